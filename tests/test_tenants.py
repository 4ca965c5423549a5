"""Tenants' branches never meet, whatever the ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from services.router.access import KeyEntry
from services.router.claims import Hints
from services.router.hooks import read_hook
from services.router.identity import Identity
from services.router.tenants import Identities, qualified, split, tenant_of

ODD = st.text(st.sampled_from("@|~/%a:b "), max_size=8)
BRANCHES = st.one_of(ODD, st.text(max_size=20))
TENANTS = st.one_of(ODD, st.text(max_size=12)).map(lambda text: text.replace("|", ""))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TENANTS, BRANCHES, TENANTS, BRANCHES)
@example("", "@a|b", "a", "b")
@example("", "@|b", "", "b")
@example("", "b", "", "@|b")
@example("a", "@a|b", "a", "b")
@example("@a", "b", "", "@@a|b")
@example("", "", "", "@|")
def test_different_branches_have_different_names(tenant, branch, other_tenant, other_branch):
    assume((tenant, branch) != (other_tenant, other_branch))
    assert qualified(tenant, branch) != qualified(other_tenant, other_branch)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TENANTS, BRANCHES)
@example("", "@x")
@example("", "@|x")
@example("", "a|b")
@example("@a", "@b|c")
@example("a", "")
def test_a_name_says_whose_it_is(tenant, branch):
    name = qualified(tenant, branch)
    assert split(name) == (tenant, branch)
    assert tenant_of(name) == tenant


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BRANCHES.filter(lambda branch: not branch.startswith("@")))
def test_without_tenants_a_branch_is_called_by_its_id(branch):
    assert qualified("", branch) == branch


@pytest.mark.parametrize(("tenant", "branch"), [("a|b", "c"), ("|", ""), ("a|", "@x")])
def test_a_tenant_whose_name_would_part_wrongly_is_refused_or_told_apart(tenant, branch):
    try:
        KeyEntry(name="k", sha256="0" * 64, tenant=tenant)
    except ValueError:
        return
    assert split(qualified(tenant, branch)) == (tenant, branch)


# ---------------------------------------------------------------------- identities


NO_TOKENS = np.empty(0, dtype=np.int32)


def path(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int64)


LONG = path(*range(1, 60))


def ask(
    identities: Identities, tenant: str, pages: np.ndarray = LONG, now: float = 0.0, **headers: str
) -> Identity:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return identities.identify(tenant, named, Hints(), pages, now, NO_TOKENS, 16)


def claude(identities: Identities, tenant: str, session: str = "s", agent: str = "") -> str:
    headers = {"x_claude_code_session_id": session}
    if agent:
        headers["x_claude_code_agent_id"] = agent
    return ask(identities, tenant, **headers).branch


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    TENANTS,
    TENANTS,
    st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=20),
)
def test_the_same_request_of_two_tenants_is_of_two_branches(one, two, name):
    assume(one != two)
    identities = Identities("r", 100.0)
    for headers in ({"x_ei_branch": name}, {"x_session_id": name}, {}):
        first = ask(identities, one, **headers)
        identities.done(one, first, 1.0)
        second = ask(identities, two, now=2.0, **headers)
        identities.done(two, second, 3.0)
        assert qualified(one, first.branch) != qualified(two, second.branch)
        assert ask(identities, one, now=4.0, **headers).branch == first.branch
        identities.done(one, first, 5.0)


def test_a_tenant_cannot_go_on_from_anothers_prompt():
    identities = Identities("r", 100.0)
    known = ask(identities, "a", LONG[:50])
    identities.done("a", known, 1.0)
    theirs = ask(identities, "b", LONG, now=2.0)
    assert ask(identities, "a", LONG, now=3.0).branch == known.branch
    assert qualified("b", theirs.branch) != qualified("a", known.branch)


def test_what_is_over_is_over_for_its_tenant_alone():
    identities = Identities("r", 100.0)
    for tenant in ("a", "b", ""):
        claude(identities, tenant, agent="one")
    identities.end(qualified("a", "claude:s/one"))
    assert identities.of("a").branches_of("claude:s") == ["claude:s"]
    assert identities.of("b").branches_of("claude:s") == ["claude:s", "claude:s/one"]
    assert identities.of("").branches_of("claude:s") == ["claude:s", "claude:s/one"]
    identities.end("claude:s/one")
    assert identities.of("").branches_of("claude:s") == ["claude:s"]
    assert identities.of("b").branches_of("claude:s") == ["claude:s", "claude:s/one"]
    identities.end(qualified("nobody", "x"))  # of a tenant that was never seen


def test_what_another_router_serves_is_its_tenants():
    """Its path is known to be a branch's: the next request that goes on from it has the branch."""
    identities = Identities("r", 1000.0)
    identities.observe(qualified("a", "auto-other-1"), LONG[:50], 0.0)
    assert ask(identities, "a", LONG, now=100.0).branch == "auto-other-1"
    assert ask(identities, "b", LONG, now=100.0).branch != "auto-other-1"
    assert ask(identities, "", LONG, now=100.0).branch != "auto-other-1"


# ---------------------------------------------------------------------- hooks


def hook(event: str, session: str = "s", **more: str) -> bytes:
    fields = {"hook_event_name": event, "session_id": session, **more}
    return ("{" + ",".join(f'"{k}":"{v}"' for k, v in fields.items()) + "}").encode()


@pytest.mark.parametrize("tenant", ["", "a", "@a"])
def test_the_end_of_a_session_ends_its_branches_of_that_tenant(tenant):
    identities = Identities("r", 100.0)
    for name in {"", "a", "@a", "b"}:
        for agent in ("", "one", "two"):
            claude(identities, name, agent=agent)
        claude(identities, name, session="other", agent="one")
    ends = identities.hooked(tenant, read_hook(hook("SessionEnd")))
    own = ["claude:s", "claude:s/one", "claude:s/two"]
    assert sorted(ends) == [qualified(tenant, branch) for branch in own]
    for branch in ends:
        identities.end(branch)
    assert identities.of(tenant).branches_of("claude:s") == ["claude:s"]
    assert len(identities.of("b").branches_of("claude:s")) == 3
    assert len(identities.of(tenant).branches_of("claude:other")) == 2


def test_a_subagents_end_is_one_branchs():
    identities = Identities("r", 100.0)
    assert identities.hooked("a", read_hook(hook("SubagentStop", agent_id="one"))) == ["@a|claude:s/one"]
    assert identities.hooked("", read_hook(hook("SubagentStop", agent_id="one"))) == ["claude:s/one"]
    assert identities.hooked("a", read_hook(hook("SubagentStop"))) == []
    assert identities.hooked("a", read_hook(hook("Stop"))) == []


def test_an_announced_compaction_is_its_tenants():
    """The next request, which has nothing in common with it, rewrites the main branch; another tenant's does not."""
    identities = Identities("r", 100.0)
    other = path(*range(1000, 1060))
    found = {}
    for tenant in ("a", "b"):
        first = ask(identities, tenant, x_session_id="s")
        identities.done(tenant, first, 1.0)
    # The hook names Claude's sessions, so the main branch is one of them.
    for tenant in ("a", "b"):
        claude_main = ask(identities, tenant, x_claude_code_session_id="s")
        identities.done(tenant, claude_main, 1.0)
    assert identities.hooked("a", read_hook(hook("PreCompact"))) == []
    for tenant in ("a", "b"):
        found[tenant] = ask(identities, tenant, other[:40], now=2.0, x_claude_code_session_id="s").branch
    assert found["a"] == "claude:s"
    assert found["b"] != "claude:s"


def test_hints_in_the_body_are_the_tenants_too():
    identities = Identities("r", 100.0)
    hints = Hints(session_id=Raw(b'"x"'))
    names = {
        qualified(t, identities.identify(t, {}, hints, LONG, 0.0, NO_TOKENS, 16).branch)
        for t in ("", "a", "b")
    }
    assert names == {"session:x", "@a|session:x", "@b|session:x"}
