"""Text that grows token by token: nothing is shown that must be taken back."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from MaxText.inference.generate import IncrementalDetokenizer


def decode(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def pieces_of(encoded, stops=()):
    stream = IncrementalDetokenizer(decode, stops)
    pieces = []
    for byte in encoded:
        pieces.append(stream.add(byte))
        if stream.stopped:
            break
    return stream, [*pieces, stream.finish()]


@settings(max_examples=60, deadline=None)
@given(
    st.text("ab€", max_size=30) | st.text(max_size=30),
    st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3),
)
@example("xaby", ["b", "ab"])  # two at once
def test_pieces_make_up_the_text_before_the_first_stop(text, stops):
    stream, pieces = pieces_of(text.encode(), stops)
    stop_offsets = [text.find(stop) for stop in stops if stop in text]
    # Of a stop string that ends first nothing is shown, though another may begin before it.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    seen = text[: min(ends)] if ends else text
    begins = [seen.find(stop) for stop in stops if stop in seen]
    expected = seen[: min(begins)] if begins else text
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == bool(stop_offsets)


def test_what_may_change_is_held_back():
    # A character of several tokens, one that never ends, and the beginning of a stop string.
    assert pieces_of("a€b".encode())[1] == ["a", "", "", "€", "b", ""]
    assert pieces_of("€".encode()[:1])[1] == ["", "\ufffd"]
    pieces = ["o", "n", "e", "", "", "\n\nt", "w", "o", "", "\n"]
    assert pieces_of(b"one\n\ntwo\n", ["\n\n\n"])[1] == pieces


def test_the_space_of_the_first_word_is_kept():
    # As tokenizers do that put a space before a text and take it away again.
    vocabulary = ["I", " love", " to", " eat", " apples"]

    def stripping(ids):
        return "".join(vocabulary[i] for i in ids).removeprefix(" ")

    stream = IncrementalDetokenizer(stripping, ["apples"], prompt=[0, 1, 2])
    assert [stream.add(3), stream.add(4)] == [" eat", " "]
    assert (stream.text, stream.stopped) == (" eat ", True)


def test_bytes_that_never_make_a_character_are_shown():
    _, pieces = pieces_of([0x80] * 20)
    assert any(pieces[:-1])
    assert "".join(pieces) == "\ufffd" * 20
