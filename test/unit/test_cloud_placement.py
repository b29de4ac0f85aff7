"""Choice of P and D: affinity, load on every path, dead workers dropped at once."""

from __future__ import annotations

import random
import zlib

import pytest

from vla_cloud.core.generate import ImageSpan
from vla_cloud.core.kv_events import KvChange, KvEvent
from vla_cloud.core.placement import Choice, Placement, PlacementConfig
from vla_cloud.core.router.prompt_hashes import PromptHashes
from vla_cloud.pools.codec import pack_tokens
from vla_common.clock import NS_PER_S, ManualClock


def prompt(seed: int, length: int) -> bytes:
    rng = random.Random(seed)
    return pack_tokens([rng.randrange(1000) for _ in range(length)])


def pools(prefills: int = 2, decodes: int = 2, clock: ManualClock | None = None, **config: object) -> Placement:
    placement = Placement(PlacementConfig(**config), clock)
    for i in range(prefills):
        placement.add(f"p{i}", "prefill", 100)
    for i in range(decodes):
        placement.add(f"d{i}", "decode", 100)
    return placement


def choose(placement: Placement, name: str, tokens: bytes, salt: bytes = b"", **kwargs: object) -> Choice:
    choice = placement.choose(name, 0, tokens, salt, 10, **kwargs)
    assert isinstance(choice, Choice), choice
    return choice


def test_equal_workers_share_the_load() -> None:
    placement = pools()
    seen = [choose(placement, f"r{i}", prompt(i, 100)) for i in range(4)]
    assert {c.prefill for c in seen[:2]} == {"p0", "p1"} and {c.decode for c in seen[:2]} == {"d0", "d1"}
    assert {c.prefill for c in seen[2:]} == {"p0", "p1"}


def test_the_same_beginning_goes_where_it_was_seen() -> None:
    placement = pools()
    first = choose(placement, "a", prompt(1, 200))
    assert first.prefill_tokens == 200
    placement.release("a", 0)
    choose(placement, "other", prompt(2, 200))
    again = choose(placement, "b", prompt(1, 200) + prompt(3, 30))
    assert (again.prefill, again.decode) == (first.prefill, first.decode)
    assert again.prefill_tokens == 230 - 192  # 12 whole blocks were seen


def test_tenants_do_not_share_affinity() -> None:
    placement = pools(prefills=1, decodes=1)
    choose(placement, "a", prompt(1, 200), b"one")
    assert choose(placement, "b", prompt(1, 200), b"two").prefill_tokens == 200


def test_a_short_common_beginning_does_not_decide() -> None:
    placement = pools(min_affinity_tokens=64)
    first = choose(placement, "a", prompt(1, 48) + prompt(2, 100))
    assert choose(placement, "b", prompt(1, 48) + prompt(3, 100)).prefill != first.prefill


def test_imbalance_beats_affinity() -> None:
    placement = pools(imbalance_tokens=300, imbalance_ratio=1.5)
    first = choose(placement, "a", prompt(1, 280))
    second = choose(placement, "b", prompt(1, 280) + prompt(2, 280))
    assert second.prefill == first.prefill
    assert choose(placement, "c", prompt(1, 280) + prompt(3, 50)).prefill != first.prefill


def test_a_miss_goes_to_the_least_load_not_to_the_emptiest_cache() -> None:  # sglang#14305
    placement = pools(prefills=2, decodes=1)
    first = choose(placement, "a", prompt(1, 400)).prefill
    placement.release("a", 0)
    other = {"p0": "p1", "p1": "p0"}[first]
    busy = choose(placement, "b", prompt(2, 300), exclude=[first])
    assert busy.prefill == other
    assert choose(placement, "c", prompt(3, 100)).prefill == first  # seen more, loaded less


def test_serving_needs_workers_for_every_stage() -> None:
    placement = pools(prefills=1, decodes=0)
    assert not placement.can_serve
    placement.add("d0", "decode", 10)
    assert placement.can_serve
    placement.drain("d0")
    assert not placement.can_serve
    placement.add("w0", "both", 10)
    assert placement.can_serve


def test_excluded_and_preferred_workers() -> None:
    placement = pools()
    assert choose(placement, "a", prompt(1, 50), exclude={"p0", "d0"}) == Choice("p1", "d1", 50, 60)
    assert choose(placement, "b", prompt(2, 50), prefer_prefill="p1").prefill == "p1"
    assert choose(placement, "c", prompt(3, 50), prefer_prefill="gone").prefill in ("p0", "p1")
    assert choose(placement, "d", prompt(4, 50), prefer_prefill="p1", exclude={"p1"}).prefill == "p0"


def test_why_there_is_no_place() -> None:
    assert Placement(PlacementConfig()).choose("a", 0, prompt(1, 10), b"", 1) == "no decode worker is ready"
    placement = pools(prefills=1, decodes=1)
    assert placement.choose("a", 0, prompt(1, 10), b"", 1, {"d0"}) == "no other decode worker"
    assert placement.choose("a", 0, prompt(1, 10), b"", 1, {"p0"}) == "no other prefill worker"
    placement.remove("p0")
    assert placement.choose("a", 0, prompt(1, 10), b"", 1) == "no prefill worker is ready"


def test_load_is_counted_on_every_path_and_comes_back_on_every_path() -> None:  # router#179
    placement = pools(prefills=1, decodes=1, skip_transfer_tokens=16)
    choose(placement, "a", prompt(1, 100))
    assert (placement.load_tokens("p0"), placement.load_tokens("d0")) == (100, 110)
    placement.prefill_done("a", 0)
    placement.prefill_done("a", 0)
    assert (placement.load_tokens("p0"), placement.load_tokens("d0")) == (0, 110)
    alone = choose(placement, "b", prompt(1, 100))  # D has seen all but 4 tokens: without P
    assert alone.prefill is None and (placement.load_tokens("p0"), placement.load_tokens("d0")) == (0, 220)
    for name in ("a", "a", "b", "unknown"):
        placement.release(name, 0)
    assert (placement.load_tokens("p0"), placement.load_tokens("d0")) == (0, 0)


def test_a_dead_worker_and_its_cache_are_forgotten_at_once() -> None:
    placement = pools(prefills=2, decodes=1)
    first = choose(placement, "a", prompt(1, 200)).prefill
    placement.remove(first)
    assert choose(placement, "b", prompt(1, 200)).prefill_tokens == 200
    placement.add(first, "prefill", 100)
    assert placement.load_tokens(first) == 0
    placement.release("a", 0)  # of the dead process: must not make the load of the new one negative
    assert placement.load_tokens(first) == 0 and placement.load_tokens("d0") == 210


def test_a_draining_worker_gets_nothing_and_a_role_may_change() -> None:
    placement = pools()
    placement.drain("p0")
    assert {choose(placement, f"r{i}", prompt(i, 50)).prefill for i in range(4)} == {"p1"}
    placement.add("d1", "prefill", 100)
    assert choose(placement, "x", prompt(9, 50), exclude={"p1"}).prefill == "d1"


def test_workers_of_both_roles_take_requests_alone() -> None:
    placement = Placement(PlacementConfig())
    placement.add("w0", "both", 10)
    placement.add("w1", "both", 10)
    chosen = [choose(placement, f"r{i}", prompt(i, 50)) for i in range(2)]
    assert {c.decode for c in chosen} == {"w0", "w1"} and {c.prefill for c in chosen} == {None}


def test_an_answer_counts_as_seen_for_the_next_turn() -> None:
    placement = pools(prefills=1, decodes=2, skip_transfer_tokens=16)
    first = choose(placement, "a", prompt(1, 64))
    placement.finished("a", 0, prompt(1, 64) + prompt(2, 32))
    turn = choose(placement, "b", prompt(1, 64) + prompt(2, 32) + prompt(3, 10))
    assert turn.prefill is None and turn.decode == first.decode


def test_what_is_remembered_is_bounded() -> None:
    placement = pools(prefills=1, decodes=1)
    for i in range(60):
        choose(placement, f"r{i}", prompt(i, 1600))
        placement.release(f"r{i}", 0)
    assert placement.index.expected("p0") == placement.index.expected("d0") == 100
    assert not placement._placed and len(placement._sessions) == len(placement.index) == 0


def events(first: int, hashes: list[bytes], change: KvChange = KvChange.STORED) -> list[KvEvent]:
    return [KvEvent(first + i, change, value) for i, value in enumerate(hashes)]


def test_what_workers_report_decides_and_what_they_drop_does_not() -> None:
    placement = pools(decodes=1, unconfirmed_s=0.0)
    hashes = list(PromptHashes(b"").extend(prompt(1, 320)))
    placement.take_events("p1", 0, events(0, hashes))
    for i in range(3):
        choice = choose(placement, f"r{i}", prompt(1, 320) + prompt(i, 16))
        assert (choice.prefill, choice.prefill_tokens) == ("p1", 16)
    placement.take_events("p1", 20, events(20, hashes[::-1], KvChange.REMOVED))
    assert choose(placement, "s", prompt(1, 320)) == Choice("p0", "d0", 320, 330)
    counts = placement.snapshot()
    assert (counts["prefill_hits"], counts["prefill_misses"], counts["index_blocks"]) == (3, 1, 0)
    assert (counts["placed"], counts["prompt_tokens"], counts["prefill_cached_tokens"]) == (4, 4 * 336 - 16, 960)


def test_a_placed_prompt_is_expected_for_a_bounded_time_and_confirmed_by_events() -> None:
    clock = ManualClock(1)
    placement = pools(decodes=1, clock=clock, unconfirmed_s=30.0)
    first = choose(placement, "a", prompt(1, 320)).prefill
    placement.release("a", 0)
    clock.advance_ns(29 * NS_PER_S)
    assert choose(placement, "b", prompt(1, 320) + prompt(2, 16)).prefill_tokens == 16
    placement.take_events(first, 0, events(0, list(PromptHashes(b"").extend(prompt(1, 160)))))
    clock.advance_ns(2 * NS_PER_S)
    again = choose(placement, "c", prompt(1, 320) + prompt(3, 16))
    assert (again.prefill, again.prefill_tokens) == (first, 176)  # the half that was not reported is not believed
    assert placement.counters["blocks_confirmed"] == 10


def test_load_that_others_placed_counts_and_own_load_does_not_count_twice() -> None:
    placement = pools(prefills=2, decodes=2)
    choose(placement, "a", prompt(1, 100))
    for name, reported in (("p0", 100), ("p1", 500), ("d0", 40), ("d1", 0)):
        placement.take_load(name, reported)
    for i in range(3):
        assert choose(placement, f"r{i}", prompt(i + 2, 100)).prefill == "p0"
    placement.take_load("p1", 0)
    assert choose(placement, "last", prompt(9, 100)).prefill == "p1"
    placement.take_load("gone", 5)


def test_reported_load_is_compared_with_what_is_placed_now() -> None:
    placement = pools(decodes=1)
    choose(placement, "a", prompt(1, 100), exclude=["p1"])
    choose(placement, "b", prompt(2, 150), exclude=["p0"])
    placement.take_load("p0", 100)  # what was placed from here: nothing more
    assert choose(placement, "c", prompt(3, 10)).prefill == "p0"
    for name in ("a", "b", "c"):
        placement.prefill_done(name, 0)
    placement.take_load("p0", 300)
    placement.take_load("p1", 320)  # all of it is foreign now, also where more was placed before
    assert choose(placement, "d", prompt(4, 10)).prefill == "p0"


def test_round_robin_goes_round_whatever_the_load() -> None:
    placement = pools(scorer="round_robin", imbalance_tokens=10)
    assert {choose(placement, f"r{i}", prompt(i, 1000 if i else 10)).prefill for i in range(2)} == {"p0", "p1"}
    chosen = [choose(placement, f"s{i}", prompt(i, 10)).prefill for i in range(4)]
    assert chosen[0] != chosen[1] and chosen[:2] == chosen[2:]


def test_a_long_answer_counts_as_far_as_it_is_expected() -> None:
    placement = pools(expected_answer_tokens=50)
    choice = placement.choose("a", 0, prompt(1, 100), b"", 4000)
    assert isinstance(choice, Choice) and choice.decode_tokens == 150
    placement.release("a", 0)
    assert placement.load_tokens(choice.decode) == 0


def test_a_session_stays_where_it_is_until_load_or_death_or_time_says_otherwise() -> None:
    clock = ManualClock(1)
    placement = pools(clock=clock, session_s=60.0, imbalance_tokens=1000)

    def ask(name: str, salt: bytes = b"", session: str = "s", length: int = 200) -> Choice:
        return choose(placement, name, prompt(zlib.crc32(name.encode()), length), salt, session=session)

    first = ask("a")
    for i in range(4):  # other prompts, more load: still there
        again = ask(f"b{i}")
        assert (again.prefill, again.decode) == (first.prefill, first.decode)
    assert ask("tenant", b"t").prefill != first.prefill  # the same name of another tenant is another session
    assert ask("full", length=1200).prefill == first.prefill
    assert ask("moved").prefill != first.prefill  # imbalance
    assert placement.counters["prefill_session"] == 5 and placement.counters["prefill_imbalance"] == 1
    placement.remove("p0")
    placement.remove("p1")
    assert placement.choose("none", 0, prompt(1, 10), b"", 1, session="s") == "no prefill worker is ready"
    clock.advance_ns(61 * NS_PER_S)
    placement.add("p2", "prefill", 100)
    ask("late")
    assert placement.counters["prefill_session"] == 5 and len(placement._sessions) == 1


def test_only_the_beginning_of_a_prompt_is_looked_at() -> None:
    placement = pools(prefills=1, decodes=1, max_prefix_tokens=70)
    assert choose(placement, "a", prompt(1, 320)).prefill_tokens == 320
    placement.finished("a", 0, prompt(1, 320) + prompt(2, 50))
    assert placement.index.expected("p0") == placement.index.expected("d0") == 4
    assert choose(placement, "b", prompt(1, 320)).prefill_tokens == 320 - 64


def test_sessions_are_bounded() -> None:
    placement = pools(max_sessions=10)
    for i in range(50):
        choose(placement, f"r{i}", prompt(i, 16), session=f"s{i}")
        placement.release(f"r{i}", 0)
    assert placement.snapshot()["sessions"] == 10
    off = pools(session_s=0.0)
    choose(off, "a", prompt(1, 16), session="s")
    assert off.snapshot()["sessions"] == 0


@pytest.mark.parametrize("scorer", ["least_load", "round_robin"])
def test_other_scorers_leave_caches_aside_and_count_load_all_the_same(scorer: str) -> None:
    placement = pools(scorer=scorer)
    first = choose(placement, "a", prompt(1, 200))
    again = choose(placement, "b", prompt(1, 200))
    assert again.prefill != first.prefill and placement.load_tokens(again.prefill) == 200
    for name in ("a", "b"):
        placement.release(name, 0)
    assert [placement.load_tokens(name) for name in ("p0", "p1", "d0", "d1")] == [0, 0, 0, 0]


def test_images_and_tenants_have_hashes_of_their_own_and_one_object_serves_all_attempts() -> None:
    placement = pools(prefills=1, decodes=1)
    image = ImageSpan(0, 4, b"i" * 32)
    choose(placement, "a", prompt(1, 64), hashes=PromptHashes(b"t", (image,)))
    assert choose(placement, "b", prompt(1, 64), b"t").prefill_tokens == 64
    hashes = PromptHashes(b"t", (image,))
    assert choose(placement, "c", prompt(1, 64), hashes=hashes).prefill_tokens == 1
    placement.release("c", 0)
    again = placement.choose("c", 1, prompt(1, 64) + prompt(2, 40), b"t", 5, hashes=hashes)
    assert isinstance(again, Choice) and again.prefill_tokens == 40


def test_a_worker_that_is_gone_is_out_of_the_index_at_once() -> None:
    placement = pools(prefills=2, decodes=1, unconfirmed_s=0.0)
    hashes = list(PromptHashes(b"").extend(prompt(1, 320)))
    placement.take_events("p1", 0, events(0, hashes))
    placement.remove("p1")
    assert choose(placement, "a", prompt(1, 320)).prefill_tokens == 320
    placement.add("p1", "prefill", 100)  # another process: numbers begin at 0
    assert placement.index.match(hashes) == {} and not placement.take_events("p1", 0, events(0, hashes[:3]))
    assert placement.index.match(hashes) == {"p1": 3}


def computed(placement: Placement, clock: ManualClock, prompts: int, tokens: int, seconds: float) -> None:
    """So many prompts, one after another, on each P in turn."""
    for i in range(prompts):
        choose(placement, f"speed {i}", prompt(1000 + i, tokens))
        clock.advance_ns(round(seconds * NS_PER_S))
        placement.prefill_done(f"speed {i}", 0)
        placement.release(f"speed {i}", 0)


def test_the_imbalance_that_decides_grows_with_the_speed_of_the_workers() -> None:
    def second_choice(seconds: float) -> bool:
        """Whether the same prompt goes to the P that has it, beside 3,000 tokens of load there."""
        clock = ManualClock()
        placement = pools(decodes=1, clock=clock, imbalance_tokens=1000, imbalance_s=10.0)
        computed(placement, clock, 10, 500, seconds)
        assert placement._speed.tokens_s == pytest.approx(500 / seconds)
        first = choose(placement, "a", prompt(1, 3000))
        return choose(placement, "b", prompt(1, 3000)).prefill == first.prefill

    assert second_choice(1.0)  # 500 tokens/s: 5,000 may differ
    assert not second_choice(10.0)  # 50 tokens/s: 500 would, but 1,000 are the least


def test_the_speed_is_that_of_busy_workers_and_of_prompts_that_were_done() -> None:
    clock = ManualClock()
    placement = pools(prefills=1, decodes=1, clock=clock)
    for round_ in range(5):
        clock.advance_ns(100 * NS_PER_S)  # nobody works
        for name in "abc":
            choose(placement, f"{name}{round_}", prompt(ord(name) + 10 * round_, 400))
        clock.advance_ns(NS_PER_S)
        placement.release(f"a{round_}", 0)  # given up: its time belongs to nobody
        for name in "bc":
            clock.advance_ns(2 * NS_PER_S)
            placement.prefill_done(f"{name}{round_}", 0)
            placement.release(f"{name}{round_}", 0)
    assert placement._speed.tokens_s == pytest.approx(200.0)


def test_before_enough_prompts_were_done_no_speed_is_known() -> None:
    clock = ManualClock()
    placement = pools(prefills=1, decodes=1, clock=clock)
    computed(placement, clock, 7, 100, 1.0)
    assert placement._speed.tokens_s == 0.0
    computed(placement, clock, 1, 100, 1.0)
    assert placement._speed.tokens_s > 0.0
    placement.remove("p0")
    placement.prefill_done("gone", 0)
