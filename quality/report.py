"""The tables that the suite prints."""

from collections.abc import Sequence

from quality.check import Verdict


def table(verdicts: Sequence[Verdict]) -> str:
    """One Markdown row for each statistic."""
    lines = ["| size | statistic | value | expected | limits | |", "|---:|---|---:|---:|---|---|"]
    for verdict in verdicts:
        statistic = verdict.statistic
        limits = f"{_number(verdict.lowest)} to {_number(verdict.highest)}"
        passed = "ok" if verdict.holds else "FAILED"
        lines.append(
            f"| {statistic.size:,} | {statistic.name} | {_number(statistic.value)} | {_number(statistic.mean)} "
            f"| {limits} | {passed} |"
        )
    return "\n".join(lines)


def summary(verdicts: Sequence[Verdict]) -> str:
    """One Markdown row for each size: how many statistics, and which is furthest from what is expected."""
    lines = ["| size | statistics | failed | furthest off | standard deviations |", "|---:|---:|---:|---|---:|"]
    for size in dict.fromkeys(verdict.statistic.size for verdict in verdicts):
        here = [verdict for verdict in verdicts if verdict.statistic.size == size]
        furthest = max((verdict.statistic for verdict in here), key=lambda statistic: abs(statistic.deviation))
        failed = sum(not verdict.holds for verdict in here)
        lines.append(f"| {size:,} | {len(here)} | {failed} | {furthest.name} | {furthest.deviation:+,.1f} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}" if abs(value) >= 1_000 else f"{value:.4g}"
