"""Which agent branch a request belongs to (paper, sections 4.3 and E.1), whatever harness sends it.

Rules that hold here
- No I/O, no clock: `now` is an argument, in cluster seconds.
- The first row of this table that the request fills decides. An id that is no id (too long, unprintable, no
  string) does not fill its row, except in our own headers, where it is the client's error. `exact` ids name one
  agent; `session` ids name a conversation that others may share.

  | source | id | says | branch |
  |---|---|---|---|
  | ei | X-EI-Branch | exact | the id itself |
  | dynamo | X-Dynamo-Session-ID; nvext.agent_context: trajectory_id or session_id | exact | `dynamo:ID` |
  | claude | x-claude-code-agent-id in a session (next row) | exact | `claude:SESSION/AGENT` |
  | claude | x-claude-code-session-id, or metadata.user_id | session | `claude:SESSION` |
  | codex | thread-id, else the thread_id of x-codex-turn-metadata | exact | `codex:THREAD`, `.../memory` |
  | opencode | x-session-affinity or X-Session-Id, from OpenCode | session | `session:ID` |
  | routing_key | X-SMG-Routing-Key | session | `route:ID` |
  | session | X-Session-ID | session | `session:ID` |
  | program | body program_id | session | `program:ID` |
  | conversation | body conversation | session | `conversation:ID` |
  | body_session | body session_id | session | `session:ID` |
  | cache_key | body prompt_cache_key | session | `cache:ID` |
  | correlation | X-Correlation-ID | session | `correlation:ID` |
  | path | nothing | | `auto-...` |

- An exact id is believed, whatever the prompt. Within a session (and among the requests that say nothing) the
  branch is found by the path. Branches that are found so never leave their session: the first request of one is
  its *main* branch, named by the session alone; others are `SESSION~auto-...`.
- **Goes on.** A request that begins with the whole last path of an idle branch continues it: the next step, a
  retry, another try of the same prompt. The longest such path counts. Where the tokens are given, the few after
  the last full page must be there, too (all but the last ones, which a chat template may write differently once
  there is an answer). A branch with a request in flight is not idle: parallel samples of one prompt, and what
  goes on from a prompt that has no answer yet, are branches of their own.
- **Edits.** A request that leaves an idle branch only in its last `EDIT_PAGES`, and after more than the whole
  prompt of the step before, continues it: the last message was edited, or a template wrote it anew. To share
  that much is to share an answer, which two conversations that only begin alike do not.
- **Rewrites**, in sessions only, of idle branches. The request shares half of the branch's path, and more than
  its first prompt (reasoning left out of a history, say). What shares less may be a sub-agent as well as a
  compaction, and is a branch of its own, except for the main branch of Claude Code or OpenCode, whose sub-agents
  have ids of their own. There, a request that is not *short* (`short_pages`: titles, quota checks and other
  helpers of the harness are) rewrites the main branch when an eighth of it is the main branch's prefix (tools and
  system prompt survive a compaction); with Claude Code also when it is about as long as the main branch or
  longer (a changed tool or system prompt breaks every prefix). A first request that is short gives its place as
  main branch to the first one that is not.
- **Announced compactions** (`compacting`). The next request that does not go on from a branch of the session
  rewrites the main branch, unless it is short and shares nothing.
- **Errors are undone.** What an edit or a rewrite left is remembered: when a request goes on from there, it gets
  the branch back, and what had taken it for one request gets a branch of its own.
- **Ids that change with every request.** A new id whose prompt goes on from a branch of the same row takes that
  branch over, as long as the branch's own id came only once. For X-Correlation-ID, which names a call rather
  than a conversation, the path is enough; for the other session rows that no harness vouches for, the tokens
  must show that the shared part is no mere common beginning.
- Requests below one page have no path: without an id each is a branch; in a session that has a path they share
  one beside it.
- Bounded: branches idle for `idle_s`, and the least recently used beyond `limit` or `max_pages`, are forgotten
  here; the directory ends them by its own idle time. A request costs two vectorised passes over its path.
- Page names are chained, so one equal page proves an equal prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from services.router.branches import common_pages
from services.router.claims import Claim, Hints, RequestKind, claim_of, said_yes
from services.router.known_branches import NO_PATH, KnownBranch, Marks, Prompt, salted
from shared.messages import PageArray
from shared.openai import ApiError, TokenArray

BRANCH = "X-EI-Branch"
PARENT = "X-EI-Parent-Branch"
FINAL = "X-EI-Branch-Final"
DYNAMO_FINAL = "X-Dynamo-Session-Final"
INFERRED = "auto-"  # every router's prefix of inferred ids begins so
MAX_ID_LENGTH = 256
EDIT_PAGES = 64
SHORT_PAGES = 32
PROOF_TOKENS = 4  # this many equal tokens after the last full page are no coincidence
OBSERVED_BUSY_S = 10.0  # another router's request is taken to be in flight, for the same prompt

_POOLS = ("route", "session", "cache", "correlation")  # prefixes of ids that may change with every request
_SESSIONS = ("claude", "program", "conversation", *_POOLS)  # prefixes of what branches are inferred in


class Identity(msgspec.Struct, frozen=True):
    branch: str
    parent: str | None = None
    final: bool = False  # the branch ends with this request
    tagged: bool = True  # the client named the branch or its session
    kind: RequestKind = RequestKind.TURN
    source: str = "ei"  # the row of the table
    session: str | None = None  # main branch of the session, None without one


def check_branch_id(value: str, where: str) -> str:
    """The id, stripped. Raises ApiError 400 when it is empty, too long or not printable."""
    value = value.strip()
    if not value or len(value) > MAX_ID_LENGTH or not value.isprintable():
        raise ApiError(
            400, f"{where} must be 1 to {MAX_ID_LENGTH} printable characters.", param=where, code="bad_branch"
        )
    return value


class Identifier:
    """Names the branch of each request."""

    def __init__(
        self,
        prefix: str,
        idle_s: float = 7200.0,
        limit: int = 50_000,
        max_pages: int = 2**25,
        short_pages: int = SHORT_PAGES,
    ) -> None:
        """`prefix` of inferred ids begins with `INFERRED` and is this router's alone."""
        self._prefix, self._idle_s, self._limit = prefix, idle_s, limit
        self._max_pages, self._short_pages = max_pages, short_pages
        self._made = 0
        self._pages = 0  # of all known paths
        self._known: OrderedDict[str, KnownBranch] = OrderedDict()  # least recently used first
        self._sessions: dict[str, dict[str, KnownBranch]] = {}
        self._ends = Marks(
            limit
        )  # last pages of paths, of left paths, and of those that a new id may take over
        self._firsts = Marks(limit)  # last pages of branches' first paths

    # ------------------------------------------------------------------ requests

    def identify(
        self,
        headers: Mapping[str, str],
        hints: Hints,
        path: PageArray,
        now: float,
        tokens: TokenArray | None = None,
        page_size: int = 0,
    ) -> Identity:
        """The request's branch, in flight from now until `done`. `headers` has lower-case names.

        `tokens` are the whole prompt's, `page_size` of them a page: with them, two conversations that differ only
        after their last full page are told apart. Raises ApiError 400 when our own headers hold no branch id.
        """
        final = said_yes(headers.get(FINAL.lower())) or said_yes(headers.get(DYNAMO_FINAL.lower()))
        tagged = headers.get(BRANCH.lower())
        if tagged is not None:
            parent = headers.get(PARENT.lower())
            return Identity(
                check_branch_id(tagged, BRANCH), check_branch_id(parent, PARENT) if parent else None, final
            )
        claim = claim_of(headers, hints)
        self._expire(now)
        if claim.branch:
            if claim.source == "claude":  # its session's end is its own
                self._touch(self._note(claim.branch, claim.session, now, exact=True), now)
            branch, parent = claim.branch, claim.parent
        else:
            prompt = Prompt(path, tokens if page_size else None, page_size)
            branch = self._infer(claim, prompt, now, final)
            parent = claim.parent or (claim.session if branch != claim.session else "")
        return Identity(
            branch,
            parent or None,
            final or claim.final,
            claim.source != "path",
            claim.kind,
            claim.source,
            claim.session or None,
        )

    def done(self, branch: str, now: float) -> None:
        """A request of the branch is over, however it ended."""
        known = self._known.get(branch)
        if known is not None:
            known.in_flight = max(0, known.in_flight - 1)
            self._touch(known, now)

    def end(self, branch: str) -> None:
        """The branch is over: no later request continues it."""
        known = self._known.pop(branch, None)
        if known is None:
            return
        self._unmark(known)
        self._pages -= known.path.size
        session = self._sessions[known.session]
        del session[branch]
        if not session:
            del self._sessions[known.session]

    def observe(self, branch: str, path: PageArray, now: float) -> None:
        """Learn where a branch stands that another router serves. Ids that no Identifier infers in are ignored."""
        if branch.startswith(INFERRED):
            session = ""
        else:
            prefix, colon, name = branch.partition(":")
            if not colon or prefix not in _SESSIONS:
                return
            session = f"{prefix}:{name.partition('~')[0].partition('/')[0]}"
        self._expire(now)
        if session and branch.startswith(session + "/"):
            self._touch(self._note(branch, session, now, exact=True), now)
            return
        if path.size == 0 and not session:
            return
        pool = session.partition(":")[0]
        known = self._note(branch, session, now, pool=pool if pool in _POOLS else "")
        self._move(known, Prompt(path, None, 0), now)
        known.observed_t = now

    # ------------------------------------------------------------------ hooks

    def branches_of(self, session: str) -> list[str]:
        """The session's main branch, known or not, and every other branch of it that is known."""
        return [session, *(name for name in self._sessions.get(session, ()) if name != session)]

    def compacting(self, branch: str) -> None:
        """The branch is about to be rewritten: after its summary has been asked for, so within two more steps."""
        known = self._known.get(branch)
        if known is not None:
            known.compacting = 2

    # ------------------------------------------------------------------ inference

    def _infer(self, claim: Claim, prompt: Prompt, now: float, final: bool) -> str:
        path, session = prompt.path, claim.session
        if path.size == 0 and not session:
            return self._new_name("")
        known = self._main(session)
        if path.size == 0:
            if known is not None and known.path.size and not final:
                known = self._note(session + "~small", session, now)
        else:
            known = self._continued(claim, prompt, final, now)
        if known is None:
            known = self._note(self._new_name(session), session, now, pool=claim.pool)
        if path.size or known.path.size == 0:
            self._move(known, prompt, now)
        known.in_flight += 1
        return known.branch

    def _main(self, session: str) -> KnownBranch | None:
        return self._sessions.get(session, {}).get(session)

    def _new_name(self, session: str) -> str:
        """The session's name for its first branch; a changing id may have taken it over."""
        if session and session not in self._known:
            return session
        self._made += 1
        return f"{session}~{self._prefix}{self._made}" if session else f"{self._prefix}{self._made}"

    def _continued(self, claim: Claim, prompt: Prompt, final: bool, now: float) -> KnownBranch | None:
        """The branch that the request is a step of; None when it begins one."""
        session, main = claim.session, self._main(claim.session)
        if claim.pool and session not in self._sessions:
            return self._taken_over(claim, prompt, now)
        for size, ending in self._ends.find(prompt.path, salted(session)):
            found, busy = self._going_on(ending, session, size, prompt, now)
            if found is not None:
                return found
            if busy:
                return None
        if main is not None and (main.path.size == 0 or final):
            return main
        return self._rewritten(claim, prompt)

    def _going_on(
        self, ending: list[KnownBranch], session: str, size: int, prompt: Prompt, now: float
    ) -> tuple[KnownBranch | None, bool]:
        """Of the branches that end there: the idle one that goes on, else whether a busy one would."""
        page, busy, left = int(prompt.path[size - 1]), False, None
        for known in ending:
            if known.session != session:
                continue
            if known.ends_at(size, page):
                if prompt.equal_rest(known) < 0:
                    continue
                if not self._busy(known, prompt.path, now):
                    return known, False
                busy = True
            elif known.left == (size, page):
                left = left or known
        if busy or left is None:
            return None, busy
        self._undo(left, prompt.path[:size], now)
        return left, False

    @staticmethod
    def _busy(known: KnownBranch, path: PageArray, now: float) -> bool:
        if known.in_flight:
            return True
        return path.size == known.path.size and now - known.observed_t < OBSERVED_BUSY_S

    def _undo(self, known: KnownBranch, left: PageArray, now: float) -> None:
        """An edit or rewrite of the branch was something else: that gets a branch of its own, this one its path."""
        self._unmark(known)
        other = self._note(self._new_name(known.session), known.session, now, pool=known.pool)
        other.path, other.rest, other.page_size = known.path, known.rest, known.page_size
        other.first = other.before = known.path.size
        other.requests = known.requests
        self._mark(other)
        known.path, known.rest, known.left = left, None, (0, 0)
        known.first = known.before = left.size
        self._pages += left.size
        self._mark(known)

    def _taken_over(self, claim: Claim, prompt: Prompt, now: float) -> KnownBranch | None:
        """The branch of an id that came only once, when this new id's prompt goes on from it."""
        for size, ending in self._ends.find(prompt.path, salted(claim.pool)):
            page = int(prompt.path[size - 1])
            for known in ending:
                if known.pool != claim.pool or not known.ends_at(size, page):
                    continue
                if self._busy(known, prompt.path, now) or size == prompt.path.size:
                    continue
                equal = prompt.equal_rest(known)
                if equal < 0 or (claim.source != "correlation" and equal < PROOF_TOKENS):
                    continue
                self._unmark(known)
                del self._sessions[known.session][known.branch]
                if not self._sessions[known.session]:
                    del self._sessions[known.session]
                known.session = claim.session
                self._sessions.setdefault(claim.session, {})[known.branch] = known
                known.requests = 0  # of this id
                self._mark(known)
                return known
        return None

    def _rewritten(self, claim: Claim, prompt: Prompt) -> KnownBranch | None:
        """The idle branch of which the request is an edit, a rewrite or a compaction."""
        path, session, main = prompt.path, claim.session, self._main(claim.session)
        shared = common_pages(main.path, path) if main is not None else 0
        short = path.size < self._short_pages
        if main is not None and main.compacting and (shared or not short):
            return main
        best, most = None, 0
        for _, begun in self._firsts.find(path, salted(session)):
            for known in begun:
                if known.session != session or known.in_flight:
                    continue
                common = common_pages(known.path, path)
                edited = common > known.before and known.path.size - common <= EDIT_PAGES
                kept = bool(session) and common > known.first and 2 * common >= known.path.size
                if common > most and (edited or kept):
                    best, most = known, common
        if best is not None or main is None or short or not claim.own_agents:
            return best
        if main.path.size < self._short_pages:
            return self._emptied(main) if main.requests == 1 else None
        as_long = claim.prefix_breaks and 5 * path.size >= 4 * main.path.size
        return main if not main.in_flight and (8 * shared >= path.size or as_long) else None

    def _emptied(self, known: KnownBranch) -> KnownBranch:
        """The branch without its path, which nobody goes on from."""
        self._unmark(known)
        self._pages -= known.path.size
        known.path, known.rest = NO_PATH, None
        self._mark(known)
        return known

    # ------------------------------------------------------------------ the books

    def _note(
        self, branch: str, session: str, now: float, exact: bool = False, pool: str = ""
    ) -> KnownBranch:
        known = self._known.get(branch)
        if known is None:
            known = self._known[branch] = KnownBranch(branch, session, exact, now, pool)
            self._sessions.setdefault(session, {})[branch] = known
        return known

    def _touch(self, known: KnownBranch, now: float) -> None:
        known.last_t = now
        self._known.move_to_end(known.branch)

    def _move(self, known: KnownBranch, prompt: Prompt, now: float) -> None:
        """The branch stands at the prompt now."""
        path = prompt.path
        self._unmark(known)
        old = known.path
        if old.size == 0:
            known.first = known.before = path.size
        elif known.begins(path):
            if path.size > old.size:
                known.before = old.size
            known.compacting = max(0, known.compacting - 1)
        else:
            common = common_pages(old, path)
            known.left = (old.size, int(old[-1]))
            if common <= known.first:
                known.first = path.size
            if common <= known.before:
                known.before = path.size
            known.compacting = 0
        known.requests += 1
        known.path, known.rest, known.page_size = path, prompt.rest, prompt.page_size
        self._pages += path.size - old.size
        self._mark(known)
        self._touch(known, now)

    def _keys(self, known: KnownBranch) -> tuple[list[int], int | None]:
        """Keys of the branch's marks among the ends, and among the firsts."""
        salt, ends = salted(known.session), []
        if known.left[0]:
            ends.append(known.left[1] ^ salt)
        if not known.path.size:
            return ends, None
        page = int(known.path[-1])
        ends.append(page ^ salt)
        if known.pool and known.requests == 1:
            ends.append(page ^ salted(known.pool))
        begun = 0 < known.first <= known.path.size
        return ends, int(known.path[known.first - 1]) ^ salt if begun else None

    def _mark(self, known: KnownBranch) -> None:
        ends, first = self._keys(known)
        for key in ends:
            self._ends.add(key, known)
        if first is not None:
            self._firsts.add(first, known)

    def _unmark(self, known: KnownBranch) -> None:
        ends, first = self._keys(known)
        for key in ends:
            self._ends.remove(key, known)
        if first is not None:
            self._firsts.remove(first, known)

    def _expire(self, now: float) -> None:
        while self._known:
            oldest = next(iter(self._known.values()))
            full = len(self._known) >= self._limit or self._pages > self._max_pages
            if not full and now - oldest.last_t <= self._idle_s:
                return
            self.end(oldest.branch)
