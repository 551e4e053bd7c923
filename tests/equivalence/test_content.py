import pytest

from harness.equivalence.content import count_content, ends_in_loop

EOS = (0,)


def test_what_is_counted():
    outputs = [
        [5, 6, 0],  # nothing to remark
        [0],  # empty
        [5, 0, 6],  # after the end
        [7, 8] * 16,  # a loop, cut
        list(range(1, 33)),  # cut at the context
    ]
    counts = count_content(outputs, ["eos", "eos", "length", "length", "context"], EOS)
    assert (counts.outputs, counts.empty, counts.after_eos, counts.loops) == (5, 1, 1, 1)
    assert (counts.cut_at_length, counts.cut_at_context) == (2, 1)


@pytest.mark.parametrize(
    ("output", "loops"),
    [
        ([9] * 32, True),
        ([9] * 31, False),  # too short to tell
        ([*range(100), *[1, 2, 3] * 11], True),
        ([*[1, 2, 3] * 20, 4], False),  # the loop ended
        ([*range(16), *range(16)], True),
        ([*range(17), *range(17)], False),  # seen less than twice in the tail
    ],
)
def test_a_loop_fills_the_last_32_tokens_with_at_least_two_turns(output, loops):
    assert ends_in_loop(output) is loops
