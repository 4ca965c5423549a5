"""ThunderAgent by hand: pins, capacity, what is paused and resumed in which order."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.baselines.policy import Placement
from loadtest.baselines.thunder_agent import ThunderAgent, ThunderAgentSettings
from shared.messages import Phase
from tests.test_baselines_view import View, arrival, pages

# A node holds 10,000 tokens in both tiers: it pauses above 9,500 down to 8,000, and resumes up to 8,500.
SIZES = {"page_size": 10, "chunk_tokens": 100, "l1_tokens": 2000, "l2_tokens": 8000, "max_context": 1000}


def cluster(prefill: str = "a", decode: str = "z") -> View:
    return View(prefill, decode, **SIZES)


def agent(**settings: float) -> ThunderAgent:
    return ThunderAgent(ThunderAgentSettings(**{"buffer_per_program": 0, **settings}))


def ask(
    router: ThunderAgent, view: View, session: str, tokens: int, now: float = 0.0, rid: str = ""
) -> str | None:
    placed = router.place(arrival(rid or session, pages(), session, tokens), view, now)
    return None if placed is None else placed.node


def turn(router: ThunderAgent, view: View, session: str, tokens: int, now: float = 0.0) -> str | None:
    """A request that is answered at once and leaves a context of so many tokens."""
    node = ask(router, view, session, tokens, now)
    if node is not None:
        router.ended(session, tokens, now)
    return node


# ----------------------------------------------------------------- pins


def test_a_program_stays_on_its_node_and_new_ones_go_where_the_load_is_least():
    router, view = agent(), cluster("a b")
    assert ask(router, view, "s", 500) == "a"
    assert ask(router, view, "t", 300) == "b"
    assert ask(router, view, "u", 100) == "b"
    assert ask(router, view, "s", 900, rid="s2") == "a"
    assert router.used_tokens("a") == 1400
    assert router.used_tokens("b") == 400


def test_between_requests_the_last_context_counts():
    router, view = agent(buffer_per_program=100), cluster()
    ask(router, view, "s", 500)
    assert router.used_tokens("a") == 600
    router.ended("s", 640, 1.0)
    assert router.used_tokens("a") == 740


def test_programs_that_wait_for_tools_fade_from_the_load_but_keep_their_room():
    router, view = agent(), cluster("a b")
    turn(router, view, "s", 4000, now=0.0)
    assert ask(router, view, "t", 1000, now=0.0) == "b"
    # After two seconds s weighs 1,000 of its 4,000 tokens: no more than t, and a comes first.
    assert ask(router, view, "u", 100, now=2.0) == "a"
    # It still needs its room.
    assert ask(router, view, "v", 5901, now=60.0) == "b"


def test_a_program_whose_node_no_longer_prefills_gets_another():
    router, view = agent(), cluster("a b")
    assert turn(router, view, "s", 500) == "a"
    view.prefill_nodes = ["b"]
    router.node_changed("a", Phase.DECODE, 1.0)
    assert router.used_tokens("a") == 0
    assert ask(router, view, "s", 600, 2.0) == "b"


def test_a_known_program_without_a_node_is_never_held():
    router, view = agent(), cluster("a b")
    turn(router, view, "s", 500)
    ask(router, view, "t", 9000)
    view.prefill_nodes = ["b", "c"]
    router.node_changed("a", None, 1.0)
    ask(router, view, "u", 8000, 1.0)
    assert ask(router, view, "s", 9999, 2.0) == "c"


def test_a_known_program_without_a_node_takes_one_with_room_if_there_is_one():
    router, view = agent(), cluster("b")
    turn(router, view, "full", 9000)  # it fades from the load, not from the room
    view.prefill_nodes = ["a"]
    turn(router, view, "s", 500)
    view.prefill_nodes = ["b", "c"]
    router.node_changed("a", None, 1.0)
    assert ask(router, view, "busy", 3000, 1.0) == "c"
    assert ask(router, view, "new", 9999, 1.0) is None  # others that are paused are no reason to wait
    assert ask(router, view, "s", 2000, 60.0) == "c"


def test_decode_nodes_come_in_turn():
    router = agent()
    assert [router.bind(arrival(), "a", cluster("a", "d e"), 0.0) for _ in range(3)] == ["d", "e", "d"]


# ----------------------------------------------------------------- admission


@pytest.mark.parametrize(("tokens", "node"), [(1000, "a"), (1001, None)])
def test_a_new_program_needs_room_up_to_the_whole_capacity(tokens, node):
    router, view = agent(), cluster()
    ask(router, view, "s", 9000)
    assert ask(router, view, "t", tokens) == node
    assert router.paused() == ([] if node else ["t"])


def test_the_buffer_of_each_program_counts():
    router, view = agent(buffer_per_program=100), cluster()
    ask(router, view, "s", 8900)
    assert ask(router, view, "t", 901) is None
    assert ask(agent(buffer_per_program=100), view, "t", 9900) == "a"


def test_new_programs_queue_behind_paused_ones_and_known_ones_do_not():
    router, view = agent(), cluster()
    turn(router, view, "s", 9000)
    assert ask(router, view, "t", 2000) is None
    assert ask(router, view, "u", 10) is None
    assert ask(router, view, "s", 9100, rid="s2") == "a"


def test_a_held_request_may_leave():
    router, view = agent(), cluster()
    turn(router, view, "s", 9000)
    assert ask(router, view, "t", 2000) is None
    router.ended("t", 0, 1.0)
    router.session_ended("s", 2.0)
    assert router.tick(view, 5.0) == []
    assert router.paused() == []  # it may come back: its node is kept
    router.session_ended("t", 6.0)
    assert len(router) == 0


# ----------------------------------------------------------------- pausing


@pytest.mark.parametrize(("last", "paused"), [(4500, []), (4501, ["small"])])
def test_above_95_percent_programs_that_wait_for_tools_are_paused(last, paused):
    router, view = agent(), cluster()
    turn(router, view, "small", 2000)
    turn(router, view, "mid", 3000)
    turn(router, view, "big", last)
    assert router.tick(view, 5.0) == []
    assert router.paused() == paused


def test_the_smallest_go_first_until_the_target_is_met():
    router, view = agent(), cluster()
    for session, tokens in (("big", 7500), ("small", 700), ("mid", 1000), ("other", 500)):
        turn(router, view, session, tokens)
    router.tick(view, 5.0)
    # 9,700 - 500 - 700 = 8,500; the next brings it to 7,500.
    assert sorted(router.paused()) == ["mid", "other", "small"]
    assert router.used_tokens("a") == 7500


def test_a_paused_programs_next_request_is_held_until_it_is_resumed():
    router, view = agent(), cluster()
    turn(router, view, "small", 2000)
    turn(router, view, "big", 7900)
    router.tick(view, 5.0)
    assert router.paused() == ["small"]
    assert ask(router, view, "small", 2100, 6.0, rid="x") is None
    assert router.tick(view, 10.0) == []
    router.session_ended("big", 11.0)
    assert router.tick(view, 15.0) == ["x"]
    assert ask(router, view, "small", 2100, 15.0, rid="x") == "a"


def test_running_programs_are_paused_when_their_requests_end():
    router, view = agent(), cluster()
    turn(router, view, "idle", 500)
    ask(router, view, "busy", 5000)
    ask(router, view, "other", 4200)
    router.tick(view, 5.0)
    assert router.paused() == ["idle"]  # and 9,200 tokens are left
    router.ended("busy", 5100, 6.0)
    assert router.paused() == ["idle", "busy"]
    router.ended("other", 4300, 7.0)
    assert len(router.paused()) == 3


def test_a_program_with_two_requests_is_paused_after_the_second():
    router, view = agent(), cluster()
    ask(router, view, "s", 5000, rid="1")
    ask(router, view, "s", 4900, rid="2")
    router.tick(view, 5.0)
    router.ended("1", 5000, 6.0)
    assert router.paused() == []
    router.ended("2", 4900, 7.0)
    assert router.paused() == ["s"]


def test_nodes_are_judged_each_by_its_own_capacity():
    router, view = agent(), cluster("a b")
    view.profiles["b"] = msgspec.structs.replace(view.profile("b"), l2_tokens=18_000)
    view.prefill_nodes = ["b"]
    turn(router, view, "s", 9800)
    view.prefill_nodes = ["a", "b"]
    turn(router, view, "t", 9800)
    router.tick(view, 5.0)
    assert router.paused() == ["t"]


# ----------------------------------------------------------------- resuming


def paused(router: ThunderAgent, view: View, **contexts: int) -> None:
    """These programs, paused between requests, all in their second turn or later."""
    for session, tokens in contexts.items():
        turn(router, view, session, tokens)
        turn(router, view, session, tokens)
    for program in router._programs.values():
        router._pause(program)


@pytest.mark.parametrize(("tokens", "left"), [(8500, []), (8501, ["s"])])
def test_programs_resume_up_to_85_percent(tokens, left):
    router, view = agent(), cluster()
    paused(router, view, s=tokens)
    router.tick(view, 5.0)
    assert router.paused() == left


def test_what_fits_resumes_smallest_first_and_those_with_a_request_before_all():
    router, view = agent(), cluster()
    paused(router, view, idle=1000, large=5000, small=3000)
    for session in ("large", "small"):
        assert ask(router, view, session, {"large": 5000, "small": 3000}[session], 1.0) is None
    assert ask(router, view, "new", 200, 1.0) is None
    # small, large: 8,000; new: 8,200; idle does not fit. They come back largest first.
    assert router.tick(view, 5.0) == ["large", "small", "new"]
    assert router.paused() == ["idle"]


def test_resumed_programs_go_largest_first_each_where_most_room_is():
    router, view = agent(), cluster("a b")
    paused(router, view, s=3000, t=2000, u=1500)
    router.tick(view, 5.0)
    assert [router._programs[session].node for session in "stu"] == ["a", "b", "b"]


def test_a_program_that_fits_in_no_node_alone_stays_paused():
    router, view = agent(), cluster("a b")
    paused(router, view, s=4700, t=4700, u=4700)
    # 14,100 fit in the 17,000 of two nodes, but no node has room for two.
    router.tick(view, 5.0)
    assert len(router.paused()) == 1


def test_a_node_above_the_ceiling_takes_no_room_from_the_others():
    router, view = agent(), cluster("b")
    paused(router, view, s=8000)
    view.prefill_nodes = ["a"]
    router._programs["s"].paused = False  # so that the next is no reason to wait
    assert turn(router, view, "t", 9400) == "a"
    router._programs["s"].paused = True
    view.prefill_nodes = ["a", "b"]
    router.tick(view, 5.0)
    assert router.paused() == []


def test_what_is_resumed_is_not_paused_in_the_same_turn_nor_the_reverse():
    router, view = agent(), cluster()
    turn(router, view, "s", 5000)
    turn(router, view, "t", 4800)
    router.tick(view, 5.0)
    assert router.paused() == ["t"]
    router.tick(view, 10.0)
    assert router.paused() == ["t"]  # 5,000 and 4,800 exceed 8,500


def test_a_request_held_too_long_is_let_through():
    router, view = agent(), cluster()
    turn(router, view, "s", 9000)
    assert ask(router, view, "t", 4000, now=100.0) is None
    assert router.tick(view, 1899.0) == []
    assert router.tick(view, 1900.0) == ["t"]
    assert ask(router, view, "t", 4000, now=1900.0) == "a"
    assert router._programs["t"].steps == 1  # asked twice, it is one request


def test_a_program_that_ended_frees_its_room_at_once():
    router, view = agent(), cluster()
    ask(router, view, "s", 9000)
    router.session_ended("s", 1.0)
    assert router.used_tokens("a") == 0
    assert router.place(arrival("t", pages(), "t", 9000), view, 1.0) == Placement("a")
    router.ended("s", 9000, 2.0)  # its last request ends after it
    assert router.used_tokens("a") == 9000
