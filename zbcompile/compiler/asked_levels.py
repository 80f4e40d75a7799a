"""What ``recompute=`` means beside a plan or a profile that says by itself what its stages recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.errors import UsageError
from zbcompile.options import CompileOptions, MemoryLimit
from zbcompile.passes.split.recompute import AUTO, Recompute, check_recompute, level_in, level_text
from zbcompile.schedule.costs import Profile, StageCost

__all__ = ["with_levels"]


def with_levels(options: CompileOptions, asked: Recompute | None, planned: Profile | None) -> CompileOptions:
    """Return options that say what every stage recomputes, or that this is chosen with the order.

    Parameters
    ----------
    options
        All others.
    asked
        The argument of `compile`; None: what the plan or the profile says, else "auto" under a limit of
        memory, else "none".
    planned
        The costs of the plan that was given, at the levels that it runs; None: no plan, or one without costs.

    Raises
    ------
    UsageError
        ``asked`` is unknown, contradicts what was given beside it, or leaves a choice that cannot be made.
    """
    if asked is not None and asked != AUTO:
        check_recompute(asked)
    profile = options.profile if isinstance(options.profile, Profile) else None
    if options.schedule is not None:
        return _beside_plan(options, asked, planned, profile)
    if profile is None:
        default = AUTO if _limited(options.memory_limit) else "none"
        return replace(options, recompute=default if asked is None else asked)
    if asked is not None and asked != AUTO:
        chosen = _at(profile, [asked] * profile.num_stages)
        return replace(options, recompute=asked, profile=chosen)
    if asked == AUTO and not profile.offers_variants:
        raise UsageError(
            'recompute="auto" chooses among what stages cost at several levels, and the profile has one',
            where="profile",
            fix="give a profile with variants (zbcompile profile --recompute auto), a Device, or none",
        )
    recompute = AUTO if profile.offers_variants else "none"
    return replace(options, recompute=recompute, levels=_named(profile))


def _beside_plan(
    options: CompileOptions, asked: Recompute | None, planned: Profile | None, profile: Profile | None
) -> CompileOptions:
    """Take the levels that the plan says, or the one that was asked for where it says none."""
    levels = None if planned is None else _named(planned)
    if asked == AUTO and planned is None:
        raise UsageError(
            'recompute="auto" chooses with the order, and the order is given',
            where="recompute",
            fix='leave recompute out, say "none" or "full", or give a schedule file with its costs',
        )
    fixed = "none" if asked is None or asked == AUTO else asked
    if levels is not None and asked not in (None, AUTO) and any(level != asked for level in levels):
        raise UsageError(
            "the plan recomputes otherwise than asked for",
            where="recompute",
            needed=f"recompute={asked!r}, as asked for",
            given=f"{[level_text(level) for level in levels]} in the plan",
            fix="leave recompute out, or plan another schedule",
        )
    if profile is not None and profile is not planned:
        profile = _at(profile, levels or [fixed] * profile.num_stages)
    return replace(
        options, recompute=fixed, levels=levels, profile=options.profile if profile is None else profile
    )


def _named(profile: Profile) -> tuple[Recompute, ...] | None:
    """Return the levels that the stages of a profile name; None where none does."""
    levels = [level_in(stage.name) for stage in profile.stages]
    if all(level is None for level in levels):
        return None
    return tuple("none" if level is None else level for level in levels)


def _at(profile: Profile, levels: Sequence[Recompute]) -> Profile:
    """Return the profile with the costs of each stage at a level.

    A stage that names no level, and has no variant that does, is taken as it is.
    """
    if len(levels) != profile.num_stages:
        return profile  # refused where profile and schedule meet
    return profile.choose([_way(s, stage, levels[s]) for s, stage in enumerate(profile.stages)])


def _way(s: int, stage: StageCost, level: Recompute) -> int:
    known = [level_in(way.name) for way in (stage, *stage.variants)]
    if known[0] is None:
        known[0] = level if not stage.variants else "none"
    if level in known:
        return known.index(level)
    raise UsageError(
        f"the profile does not say what stage {s} costs at the level of recompute asked for",
        where=f"profile.stages[{s}]",
        needed=f"recompute={level_text(level)}",
        given=[way.name for way in (stage, *stage.variants)],
        fix='leave recompute out, or name the variant that it is: "recompute=full"',
    )


def _limited(limit: MemoryLimit) -> bool:
    return any(one is not None for one in limit) if isinstance(limit, tuple) else limit is not None
