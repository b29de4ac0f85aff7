"""Images of several cameras that belong together."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_edge.core.camera_set import DEPTH, NS, CameraSet

MS = 1_000_000
WALL_NS = 1_700_000_000 * NS
START_NS = 100 * NS


def made(*cameras, window_s=0.05, max_age_s=0.5, now_ns=START_NS):
    return CameraSet(cameras, window_s, max_age_s, now_ns)


def taken(cameras, now_ns=START_NS):
    return cameras.take(now_ns)


def test_a_single_camera_gives_each_image_at_once():
    cameras = made("front")
    assert taken(cameras) is None
    for k, stamp in enumerate((WALL_NS, WALL_NS + 1, 0, 5)):  # stamps as they like
        cameras.add("front", stamp, START_NS + k, k)
        assert taken(cameras) == [k] and taken(cameras) is None
    cameras.add("front", 0, START_NS + 9, "old")
    cameras.add("front", 0, START_NS + 9, "new")
    assert taken(cameras) == ["new"] and taken(cameras) is None


def test_stamps_count_where_all_have_them():
    """The newest of one camera belongs to an earlier one of the other, which arrived together with something else."""
    cameras = made("a", "b")
    for k in range(4):
        cameras.add("a", WALL_NS + k * 100 * MS, START_NS + k * 100 * MS, f"a{k}")
    cameras.add("b", WALL_NS + 110 * MS, START_NS + 300 * MS, "b1")
    assert taken(cameras, START_NS + 300 * MS) == ["a1", "b1"]
    cameras.add("b", WALL_NS + 90 * MS, START_NS + 310 * MS, "b0")  # a clock set back: not comparable to the former
    assert taken(cameras, START_NS + 310 * MS) is None
    cameras.add("b", WALL_NS + 310 * MS, START_NS + 320 * MS, "b3")
    assert taken(cameras, START_NS + 320 * MS) == ["a3", "b3"]


def test_arrivals_count_where_one_has_no_stamps():
    cameras = made("a", "b")
    cameras.add("a", WALL_NS, START_NS, "a")
    cameras.add("b", 0, START_NS + 50 * MS, "b")
    assert taken(cameras, START_NS + 50 * MS) == ["a", "b"]
    cameras.add("a", WALL_NS + NS, START_NS + 100 * MS, "a")
    cameras.add("b", 0, START_NS + 151 * MS, "b")
    assert taken(cameras, START_NS + 151 * MS) is None


def test_a_camera_that_begins_to_stamp_begins_anew():
    cameras = made("a", "b")
    cameras.add("a", 0, START_NS, "unstamped")
    cameras.add("a", WALL_NS, START_NS + MS, "a")
    cameras.add("b", WALL_NS + NS, START_NS + MS, "b")
    assert taken(cameras, START_NS + MS) is None  # by stamps now, and they are apart


def test_old_images_are_forgotten():
    cameras = made("a", "b")
    cameras.add("a", WALL_NS, START_NS, "a")
    cameras.add("b", WALL_NS, START_NS + 501 * MS, "b")
    assert taken(cameras, START_NS + 501 * MS) is None


def test_names():
    with pytest.raises(ValueError, match="different names"):
        made("a", "a")


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(0, 60), st.booleans(),
       st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 30), st.booleans()), max_size=40))
def test_a_set_is_within_the_window_the_newest_and_never_used_again(count, window_ms, has_stamps, arrivals):
    """Against a search through all combinations. arrivals: camera, ms since the one before, delay from stamp to arrival,
    whether a set is asked for."""
    names = [f"c{i}" for i in range(count)]
    cameras = made(*names, window_s=window_ms / 1e3, max_age_s=0.1)
    now_ns, held, used = START_NS, {name: [] for name in names}, set()
    for index, gap_ms, delay_ms, is_asked in arrivals:
        name = names[index % count]
        now_ns += gap_ms * MS
        # As the io process sees to: stamps of a camera rise.
        stamp_ns = max(now_ns - delay_ms * MS, held[name][-1][0] + 1 if held[name] else 0) if has_stamps else 0
        image = (stamp_ns if has_stamps else now_ns, now_ns, name)
        cameras.add(name, stamp_ns, now_ns, image)
        held[name] = [*held[name], image][-DEPTH:]
        if not is_asked:
            continue
        found = cameras.take(now_ns)
        fresh = {each: [one for one in held[each] if one[1] >= now_ns - 100 * MS] for each in names}
        possible = [choice for choice in itertools.product(*fresh.values())
                    if max(one[0] for one in choice) - min(one[0] for one in choice) <= window_ms * MS]
        assert (found is None) == (not possible)
        if found is not None:
            assert [one[2] for one in found] == names and tuple(found) in possible
            for choice in possible:  # newest in every camera, not only on the whole
                assert all(one[0] >= other[0] for one, other in zip(found, choice, strict=True))
            assert not used & set(found)
            used |= set(found)
            held = {each: [one for one in held[each] if one[1] > chosen[1]]
                    for each, chosen in zip(names, found, strict=True)}


class Day:
    """Feeds images every step and asks for sets, as the io process does."""

    def __init__(self, *cameras):
        self.cameras, self.now_ns, self.wanted_ns = made(*cameras), START_NS, START_NS

    def pass_by(self, count, *images, step_ms=100):
        """``count`` steps with images of (camera, stamp of the first or 0); the states that it came to."""
        states = []
        for k in range(count):
            self.now_ns += step_ms * MS
            for camera, stamp_ns in images:
                self.cameras.add(camera, stamp_ns and stamp_ns + k * step_ms * MS, self.now_ns, k)
            if self.cameras.take(self.now_ns):
                self.wanted_ns = self.now_ns
            if self.cameras.look(self.now_ns, self.wanted_ns):
                states.append(self.cameras.state)
        return states

    @property
    def words(self):
        return self.cameras.describe(self.now_ns)


def test_a_camera_that_was_never_seen_is_missing_by_name():
    day = Day("front", "wrist")
    assert day.pass_by(10, ("front", WALL_NS)) == ["camera_missing_wrist"]
    assert day.words == "camera_missing_wrist: no image that can be used yet"


def test_a_camera_that_falls_silent_is_missing_and_comes_back():
    day = Day("front", "wrist")
    assert day.pass_by(10, ("front", WALL_NS), ("wrist", WALL_NS)) == []
    assert day.pass_by(10) == ["camera_missing_front, camera_missing_wrist"]
    assert day.words.endswith("no image that can be used for 1.0 s")
    assert day.pass_by(10, ("front", WALL_NS + 60 * NS)) == ["camera_missing_wrist"]
    assert day.pass_by(10, ("front", WALL_NS + 90 * NS), ("wrist", WALL_NS + 90 * NS)) == [""] and day.words == ""


def test_a_single_camera_falls_silent():
    day = Day("front")
    assert day.pass_by(10, ("front", 0)) == []
    assert day.pass_by(10) == ["camera_missing_front"]


def test_cameras_apart_by_stamps_and_by_clocks():
    day = Day("a", "b")
    assert day.pass_by(10, ("a", WALL_NS), ("b", WALL_NS + 51 * MS), step_ms=200) == ["cameras_apart"]
    assert "by their stamps the newest are 0.051 s apart" in day.words and "io.camera_window_s" in day.words
    assert day.pass_by(10, ("a", WALL_NS + 9 * NS), ("b", WALL_NS + 9 * NS)) == [""]
    assert day.pass_by(10, ("a", WALL_NS + 20 * NS), ("b", 5 * NS)) == ["camera_clocks_differ"]
    assert "one clock" in day.words


def test_cameras_apart_by_arrivals():
    day = Day("a", "b")
    states = []
    for _ in range(10):
        states += day.pass_by(1, ("a", 0), step_ms=60) + day.pass_by(1, ("b", WALL_NS), step_ms=60)
    assert states == ["cameras_apart"] and "by their arrivals the newest are 0.060 s apart" in day.words


def test_cameras_are_not_blamed_while_no_set_is_wanted():
    cameras = made("a", "b")
    for wanted_ns in (START_NS + 10 * NS, START_NS + 1500 * MS):
        assert not cameras.look(START_NS + 2 * NS, wanted_ns) and cameras.state == ""
    assert cameras.look(START_NS + 2001 * MS, START_NS + 1500 * MS) and cameras.state.startswith("camera_missing_a")
