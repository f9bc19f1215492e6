"""Normal form C: the tokenizers library's, character by character."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from MaxText.input_pipeline.tokenization import normal_form as module
from MaxText.input_pipeline.tokenization.normal_form import normal_form

NFC = normalizers.NFC()


def test_every_character_between_marks():
    # Beyond the first two planes there are no characters that combine.
    for point in [*range(0x80, 0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 97)]:
        text = f"a{chr(point)}\u0323\u0301e\u0301"
        assert normal_form(text) == NFC.normalize_str(text), hex(point)
        text = f"a\u0301{chr(point)}"
        assert normal_form(text) == NFC.normalize_str(text), hex(point)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.characters(min_codepoint=0x300, max_codepoint=0x1FFF), max_size=12))
def test_any_text(text):
    assert normal_form(text) == NFC.normalize_str(text)


def test_the_library_is_asked_only_where_it_may_differ(monkeypatch):
    asked = []

    class Recording:
        def normalize_str(self, text):
            asked.append(text)
            return NFC.normalize_str(text)

    monkeypatch.setattr(module.normalizers, "NFC", Recording)
    assert normal_form("plain") == "plain"
    assert normal_form("Grüße 漢字 한국") == "Grüße 漢字 한국"
    assert asked == []
    assert normal_form("u\u0308") == "ü"
    unassigned = min(module._unassigned())
    assert normal_form(f"ü{unassigned}") == f"ü{unassigned}"
    assert asked == ["u\u0308", f"ü{unassigned}"]
