"""Words and prose: retired words, first lines of docstrings, sentences and pages."""

import ast
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

from MaxText.config.schema import keys_by_section
from tests.house.sources import REPOSITORY, parsed, python_files, shown

# Retired words and what replaces them. Names in stored files and keys that users type stay.
RETIRED = {
    r"go(es|ing|ne)? on where it (stood|was stopped|stopped)": "resumes",
    r"where it stood": "where it stopped",
    r"the same command\s+(again\s+)?goes on": "rerun the command to resume",
    r"(lies|lie|lay|lying) whole": "replicated, unsharded",
    r"(left|leaves?|leaving)[_ ]out": "skipped, excluded, omitted",
    r"written[_ ]out": "unrolled, expanded",
    r"(go(es|ing)?|went|gone)[_ ]back([_ ](to|at|behind))?": "roll back",
    r"(?<![\"`|])(rewinds?|rewound)(?![\"`|]|\.json|_\w+: rollback\.|: rollback\.)": "rollback",
    r"(?<!there )(is|are) no (?!longer|more|less|worse|better|later|larger)[a-z]+": "is not",
    r"mend(s|ed|ing)?": "fix",
    r"filler(_id)?|filling(?! in\b)": "padding",
    r"in_turn": "sequential",
    r"told_\w+|tell_of_\w+|(is|are) told": "log, report",
    r"whoever|nobody": "the caller, the user",
    r"now and then": "periodically",
    r"anew": "again, from scratch",
    r"beside": "next to",
    r"need not be there|that (is|are) not there|what is there": "absent, existing",
    r"(?<!self-)heal(s|ed|ing)?|may_heal": "recover",
    r"may_pass|is_passing": "is_transient",
    r"steady_(?!state)\w+|(?-i:Steady(?!State)[A-Z]\w+)": "retrying",
    r"meanwhile(\.py|\(|\.meanwhile)|import meanwhile": "run_periodically",
    r"cut[_ ]short": "truncated",
    r"(?<!\.)given[_ ]up|give_up": "failed permanently",
    r"settle[sd]?|settling": "resolve",
    r"verdicts?|is_sound|sound updates?": "decision, accepted steps",
    r"troubles?": "failure, divergence",
    r"good (checkpoint|step|state)s?|good_steps|(latest|last|mark)[_ ]good": "healthy checkpoint",
    r"pictures?": "figure, plot",
    r"folders? of Hugging Face": "Hugging Face checkpoint",
    r"(of )?(ours|theirs)": "this project's, the expected",
    r"(?<!for word )in words(?!\.\w)": "as text",
    r"mistakes? of the user": "user error",
    r"no whole number": "not an integer",
    r"sums? over depth|depth[_ ]sums?": "depth aggregation",
    r"walk_(with_history|written_out)|walked": "apply_layers",
    r"on (its|their) way": "in flight",
    r"for people|what people": "human-readable",
    r"least_\w+|most_(?!common|frequent|recent|likely)\w+": "min_*, max_*",
    r"likeliest": "argmax, most likely",
    r"(brings?|brought) along": "provides",
    r"handed_(on|back)|hands? (them |it )?on to": "passes to",
    r"in one go": "atomically",
    r"again and again|over and over": "repeatedly",
    r"comes? about|came about": "is computed",
    r"what (differs|is newest|is newer|comes out|came out)": "the differences, the result",
    r"for ever|as long as it lasts": "indefinitely",
    r"texts? at once": "batch size",
    r"imports no jax": "nothing: a test checks it",
    r"(?-i:places?_[A-Z]+)|num_places": "positions_*",
    r"(made|makes?) (again|anew)|computed? again|computes again": "recomputed",
    r"kept for the backward pass": "saved for the backward pass",
    r"\w*(normalis|tokenis|initialis|serialis|optimis(?!m)|materialis)\w*": "American spelling",
    r"\w*colour\w*|centre\w*|centring": "American spelling",
}
# Parts of identifiers are words too.
ANY_RETIRED = re.compile(rf"(?<![a-z])(?:{'|'.join(RETIRED)})(?![a-z])", re.IGNORECASE)
SPEAKING = ("MaxText", "benchmarks", "examples", "configs", "docs", "tests", "*.md")

QUOTING = ("tests/house/test_language.py",)

# A first line is a verb and its object or a noun phrase, not a clause about the name.
MAX_FIRST_LINE = 72
CLAUSE = re.compile(
    r"^(What|Where|Which|How|Why|Who|Whoever|When|Of|As|Those|That|With|By|In)\b"
    r"|\b(which|who|whom|whose)\b|(?<!so )(?<!hecks )(?<!erifies )\bthat\b"
)

MAX_WORDS_OF_SENTENCE = 30
MAX_WORDS_OF_PAGE = 1000
MAX_WORDS = 30_000  # docs/ and README.md, with all generated pages
GENERATED = "docs/reference/configuration.md"


def pages() -> dict[str, str]:
    """The pages of the documentation: those of the repository and those of the site's build."""
    written = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    conf = runpy.run_path(str(REPOSITORY / "docs" / "conf.py"))
    texts = {shown(page): page.read_text(encoding="utf-8") for page in written}
    return texts | {
        f"docs/reference/generated/{name}": text for name, text in conf["pages"]().items()
    }


def texts() -> Iterator[Path]:
    """The tracked files whose words readers see."""
    command = ["git", "ls-files", "--", *SPEAKING]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if name.endswith((".py", ".md", ".yml", ".ambr")) and name not in QUOTING:
            yield REPOSITORY / name


def test_retired_words_stay_out():
    found = [
        f"{shown(path)}:{number}: {match[0]}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := ANY_RETIRED.search(line))
    ]
    assert not found


def test_first_lines_of_docstrings():
    found = []
    for folder in ("MaxText", "benchmarks", "examples"):
        for path in python_files(folder):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    first = (ast.get_docstring(node) or "").partition("\n")[0]
                    if len(first) > MAX_FIRST_LINE or CLAUSE.search(first):
                        found.append(f"{shown(path)}: {first}")
    assert not found, f"over {MAX_FIRST_LINE} characters, or a clause"


def test_names_of_classes_are_unique():
    names = [
        node.name
        for path in python_files("MaxText")
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in names if names.count(name) > 1}


def words(text: str) -> int:
    """The number of words: what has a letter or a digit, between white space; no comments."""
    text = re.sub(r"<!--.*?-->", "", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def prose(page: str) -> str:
    """A page without fences, comments, indented code, tables and headings; code is one word."""
    page = re.sub(r"^```.*?^```$|<!--.*?-->", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^( {4}\S|\||#).*$", "\n", page, flags=re.MULTILINE)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    return re.sub(r"`[^`]*`", "Code", page)


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page; a list item begins one."""
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", prose(page), flags=re.MULTILINE):
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z*])", " ".join(block.split()))


def test_sentences_are_short():
    others = ("CHANGELOG.md", "CONTRIBUTING.md", "tests/README.md")
    texts = pages() | {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in others}
    found = [
        (name, sentence)
        for name, text in texts.items()
        for sentence in sentences(text)
        if words(sentence) > MAX_WORDS_OF_SENTENCE
    ]
    # In help texts, the values of a key begin sentences in lower case.
    keys = [key for section in keys_by_section().values() for key in section]
    found += [
        (key.name, sentence)
        for key in [*keys, *(entry for key in keys for entry in key.entries.values())]
        for sentence in re.split(r"(?<=\.)\s", key.help)
        if words(sentence) > MAX_WORDS_OF_SENTENCE
    ]
    assert not found


def test_pages_are_short():
    of_page = {name: words(text) for name, text in pages().items()}
    print(sum(of_page.values()), "words")
    assert sum(of_page.values()) <= MAX_WORDS
    of_page.pop(GENERATED)
    assert not {name: count for name, count in of_page.items() if count > MAX_WORDS_OF_PAGE}
