"""From what was measured to hardware that is not here: what each method's schedule would give.

A profile says what passes cost, an acceptance process what the target does with the drafted tokens,
a schedule how a method spends its rounds. Everything that comes out is simulated and says so.
"""
