"""Methods whose process ends in the middle of a greedy item; found by their entry points."""

import os
import signal

from baselines.ar import AutoregressiveDecoder
from harness.decoder import Request, Round


class Killed(AutoregressiveDecoder):
    """Is killed at temperature 0 in its second item, as by the system when memory runs out."""

    items = 0
    greedy = False

    def start(self, requests: list[Request]) -> None:
        super().start(requests)
        self.greedy = requests[0].sampling.temperature == 0
        self.items += not requests[0].request_id.startswith("warm-up")

    def step(self) -> list[Round]:
        if self.greedy and self.items == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()
