"""As much of pydantic as decoders' options need, without validation.

`bench_gpu` falls back on it where pydantic is not installed and nothing can be.
"""

from __future__ import annotations

from typing import Any, Self


def Field(default: Any, **_: Any) -> Any:
    return default


def ConfigDict(**settings: Any) -> dict[str, Any]:
    return settings


class BaseModel:
    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if name not in self._fields():
                raise TypeError(f"{name}: no option of {type(self).__name__}")
            setattr(self, name, value)

    @classmethod
    def model_validate(cls, values: dict[str, Any]) -> Self:
        return cls(**values)

    def model_dump(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields()}

    @classmethod
    def _fields(cls) -> list[str]:
        return [
            name
            for base in reversed(cls.__mro__)
            for name, kind in vars(base).get("__annotations__", {}).items()
            if not str(kind).startswith("ClassVar")
        ]
