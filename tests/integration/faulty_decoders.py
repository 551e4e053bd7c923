"""Methods that fail, or give a test time to make them fail; found by their entry points."""

import os
import signal
import time

from baselines.ar import AutoregressiveDecoder
from harness.decoder import Request, Round


class Killed(AutoregressiveDecoder):
    """Is killed at temperature 0 in its first item, as by the system when memory runs out."""

    measured = False
    greedy = False

    def start(self, requests: list[Request]) -> None:
        super().start(requests)
        self.greedy = requests[0].sampling.temperature == 0
        self.measured = not requests[0].request_id.startswith("warm-up")

    def step(self) -> list[Round]:
        if self.greedy and self.measured:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class Slow(AutoregressiveDecoder):
    """Takes its time, so that its node can be killed in the middle of a block."""

    def start(self, requests: list[Request]) -> None:
        time.sleep(0.2)
        super().start(requests)
