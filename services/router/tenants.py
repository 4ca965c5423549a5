"""Branch identity for several tenants: each has names of its own, so that no two can meet.

Rules that hold here
- A branch of tenant T is called `@T|ID` everywhere outside of T's `Identifier`. Without a tenant it is called ID, or
  `@|ID` where ID itself begins with `@`. So an id says whose it is, whatever a client sends.
- No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.router.claims import Hints
from services.router.hooks import HookAction
from services.router.identity import INFERRED, Identifier, Identity
from shared.messages import PageArray
from shared.openai import TokenArray


def qualified(tenant: str, branch: str) -> str:
    """The name of a tenant's branch outside of its tenant."""
    return f"@{tenant}|{branch}" if tenant or branch.startswith("@") else branch


def split(branch: str) -> tuple[str, str]:
    """Tenant, and the id within it."""
    if branch.startswith("@"):
        tenant, bar, rest = branch[1:].partition("|")
        if bar:
            return tenant, rest
    return "", branch


def own_name(tenant: str, branch: str) -> str:
    """What a tenant itself calls its branch."""
    owner, own = split(branch)
    return own if owner == tenant else branch


def tenant_of(branch: str) -> str:
    return split(branch)[0]


class Identities:
    """One `Identifier` a tenant."""

    def __init__(self, router: str, idle_s: float) -> None:
        self._prefix, self._idle_s = f"{INFERRED}{router}-", idle_s
        self._tenants: dict[str, Identifier] = {}

    def of(self, tenant: str) -> Identifier:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = Identifier(self._prefix, self._idle_s)
        return found

    def identify(
        self,
        tenant: str,
        headers: Mapping[str, str],
        hints: Hints,
        path: PageArray,
        now: float,
        tokens: TokenArray,
        page_size: int,
    ) -> Identity:
        """See `Identifier.identify`; the branch is the tenant's own name for it."""
        return self.of(tenant).identify(headers, hints, path, now, tokens, page_size)

    def done(self, tenant: str, identity: Identity, now: float) -> None:
        """A request that was identified is over."""
        self.of(tenant).done(identity.branch, now)

    def end(self, branch: str) -> None:
        """The branch (by its name outside) is over."""
        tenant, own = split(branch)
        if tenant in self._tenants:
            self._tenants[tenant].end(own)

    def observe(self, branch: str, path: PageArray, now: float) -> None:
        """Another router serves the branch, and this is its path now."""
        tenant, own = split(branch)
        self.of(tenant).observe(own, path, now)

    def hooked(self, tenant: str, action: HookAction) -> list[str]:
        """Apply a hook; returns the names outside of the branches that it ends."""
        identifier = self.of(tenant)
        if action.compacts is not None:
            identifier.compacting(action.compacts)
        ends = identifier.branches_of(action.session) if action.ends_session else action.ends
        return [qualified(tenant, branch) for branch in ends]
