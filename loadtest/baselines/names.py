"""Routers and planners by the names of the command line.

Rules that hold here
- A name stands for one rule with its peer's defaults; settings change them one by one, as text or as values.
- A name that nobody has, a setting that the policy does not have and a value of another type are a ValueError that
  says what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from loadtest.baselines.arrow import ArrowPlanner, ArrowPlannerSettings, ArrowRouter, ArrowRouterSettings
from loadtest.baselines.cache_aware import CacheAware, CacheAwareSettings
from loadtest.baselines.dynamo_planner import DynamoPlanner, DynamoPlannerSettings
from loadtest.baselines.dynamo_router import DynamoRouter, DynamoRouterSettings
from loadtest.baselines.policy import Planner, Router
from loadtest.baselines.round_robin import RoundRobin, RoundRobinSettings
from loadtest.baselines.static import Static, StaticSettings
from loadtest.baselines.sticky import Sticky, StickySettings
from loadtest.baselines.thunder_agent import ThunderAgent, ThunderAgentSettings

Settings = Mapping[str, object]
S = TypeVar("S", bound=msgspec.Struct)
Made = TypeVar("Made")


def _factory(
    settings_type: type[S], make: Callable[[S], Made], **fixed: object
) -> Callable[[Settings], Made]:
    def factory(settings: Settings) -> Made:
        for setting in settings.keys() & fixed.keys():
            raise ValueError(f"{setting} goes with the name: it is no setting")
        return make(msgspec.convert({**settings, **fixed}, settings_type, strict=False))

    return factory


ROUTERS: dict[str, Callable[[Settings], Router]] = {
    "round-robin": _factory(RoundRobinSettings, RoundRobin),
    "cache-aware": _factory(CacheAwareSettings, CacheAware),
    "sticky": _factory(StickySettings, Sticky),
    "dynamo": _factory(DynamoRouterSettings, DynamoRouter, pool=False),
    "dynamo-pool": _factory(DynamoRouterSettings, DynamoRouter, pool=True),
    "arrow": _factory(ArrowRouterSettings, ArrowRouter),
    "thunder-agent": _factory(ThunderAgentSettings, ThunderAgent),
}

PLANNERS: dict[str, Callable[[Settings], Planner]] = {
    "static": _factory(StaticSettings, Static),
    "dynamo-1.5.1": _factory(DynamoPlannerSettings, lambda settings: DynamoPlanner("1.5.1", settings)),
    "dynamo-1.6.1": _factory(DynamoPlannerSettings, lambda settings: DynamoPlanner("1.6.1", settings)),
    "arrow": _factory(ArrowPlannerSettings, ArrowPlanner),
}


def make_router(name: str, settings: Settings | None = None) -> Router:
    """A new router of that name. Raises ValueError."""
    return _make("router", ROUTERS, name, settings)


def make_planner(name: str, settings: Settings | None = None) -> Planner:
    """A new planner of that name. Raises ValueError."""
    return _make("planner", PLANNERS, name, settings)


def _make(
    kind: str, known: Mapping[str, Callable[[Settings], Made]], name: str, settings: Settings | None
) -> Made:
    factory = known.get(name)
    if factory is None:
        raise ValueError(f"no {kind} {name!r}; known: {', '.join(known)}")
    try:
        return factory(settings or {})
    except ValueError as error:  # msgspec's are ValueErrors
        raise ValueError(f"{kind} {name}: {error}") from error
