"""How hard each merge rule steps: two 16-step chunks at 100 Hz that disagree by 50 mrad.

    python benchmarks/merge_steps.py

At rest and at speed with a constant offset, and at speed from the same pose with speeds that differ by what makes
50 mrad at the chunk's end. Rules are linear, so at a constant offset the speed makes no difference. The end of the
overlap counts too: a rule without a ramp steps once more where only the new chunk is left, which later chunks prevent
only if they come in time.
"""

from __future__ import annotations

import numpy as np

from vla_edge.core.ensembler import MergeRule, make_rule

CONTROL_PERIOD_S = 0.01


def steps() -> dict[str, dict[str, float]]:
    """Largest |a| (rad/s²) and |j| (rad/s³) where a chunk of 16 steps joins one that says otherwise by 50 mrad."""
    k = np.arange(20.0)[:, None] + 1.0
    rest, cruise, faster = 0.0 * k, 0.01 * k, 0.01 * k + 0.05 * k / 16
    cases = {"at rest, offset": (rest, rest + 0.05), "at 1 rad/s, offset": (cruise, cruise + 0.05),
             "at 1 rad/s, same start, 0.31 rad/s faster": (cruise, faster)}
    rules: dict[str, MergeRule] = {
        "replace": make_rule("replace", 1), "constant 0.5": make_rule("constant", 1, alpha=0.5),
        "constant 0.3": make_rule("constant", 1, alpha=0.3),
        **{f"ramp {n}": make_rule("ramp", 1, ramp_ticks=n) for n in (5, 8, 12)},
        **{f"speed_ramp {n}": make_rule("speed_ramp", 1, ramp_ticks=n) for n in (5, 8)},
        "act, 1 chunk before": make_rule("act", 1), "act, 3 chunks before": make_rule("act", 1)}
    table = {}
    for name, rule in rules.items():
        row = {}
        for case, (old, new) in cases.items():
            speed = float(old[1, 0] - old[0, 0])
            past = old[0, 0] + speed * np.arange(-4.0, 0.0)[:, None]
            rule.reset()
            for before in range(3 if "3 chunks" in name else 1):
                rule.merge(0, old[:16] if before else old[:0], old[:16], np.empty((16, 1)))
            out = np.empty((16, 1))
            rule.merge(0, old[:16], new[:16], out)
            stream = np.concatenate([past, out, new[16:]])[:, 0]
            row[f"{case}: a"] = float(np.abs(np.diff(stream, 2)).max() / CONTROL_PERIOD_S**2)
            row[f"{case}: j"] = float(np.abs(np.diff(stream, 3)).max() / CONTROL_PERIOD_S**3)
        table[name] = row
    return table


def print_steps(table: dict[str, dict[str, float]]) -> None:
    print("50 mrad between two 100 Hz chunks: max |a| rad/s^2, |j| rad/s^3")
    cases = ("at rest, offset", "1 rad/s, offset", "1 rad/s, faster")
    print(f"{'rule':22s}" + "".join(f"{name:>24s}" for name in cases))
    for name, row in table.items():
        values = list(row.values())
        print(f"{name:22s}" + "".join(f"{a:14.0f} {j:9.0f}" for a, j in zip(values[::2], values[1::2], strict=True)))


if __name__ == "__main__":
    print_steps(steps())
