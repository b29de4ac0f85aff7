import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_cloud.core.stop_strings import StopStrings


def run(stops, pieces):
    finder = StopStrings(stops)
    out = [finder.push(piece) for piece in pieces]
    if finder.matched is None:
        out.append(finder.finish())
    return "".join(out), finder.matched


def test_a_stop_string_cut_anywhere_is_found_and_not_given_out():
    text = "one two STOP three"
    for cut in range(len(text)):
        assert run(["STOP"], [text[:cut], text[cut:]]) == ("one two ", "STOP")
    assert run(["STOP"], list(text)) == ("one two ", "STOP")


def test_text_that_only_begins_like_a_stop_string_comes_out_in_the_end():
    finder = StopStrings(["END"])
    assert finder.push("the E") == "the "
    assert finder.push("N") == ""
    assert finder.push("V") == "ENV"
    assert finder.push(" EN") == " " and finder.finish() == "EN" and finder.matched is None


def test_a_beginning_within_a_beginning_is_held_back():
    assert run(["aab"], list("aaab")) == ("a", "aab")


def test_the_first_match_counts_then_the_longest():
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")
    assert run(["ab", "abc"], ["xabc"]) == ("x", "abc")


def test_nothing_follows_a_match():
    finder = StopStrings(["."])
    assert finder.push("a.b") == "a" and finder.push("c") == "" and finder.finish() == ""


def test_without_stop_strings_nothing_is_held_back():
    assert StopStrings([]).push("abc") == "abc"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_pieces_make_no_difference_to_what_begins_first(stops, pieces):
    text = "".join(pieces)
    out, matched = run(stops, pieces)
    starts = [text.find(stop) for stop in stops if stop in text]
    if not starts:
        assert (out, matched) == (text, None)
        return
    # By pieces, a short stop may be complete before a longer one that begins earlier: text never waits for that.
    assert matched is not None and text.startswith(out + matched)
    assert not any(stop in out for stop in stops)
