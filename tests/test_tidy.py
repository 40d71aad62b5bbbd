"""Rules for names, texts and sizes that linters do not check.

Replaced words stay out of code and documents, functions and files stay small, and sentences of
documents stay short. The rules read files as text; nothing is imported.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PRODUCT_FOLDERS = ("protocol", "daemon", "broker", "nameserver", "clients", "conf", "examples")

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 800
SENTENCE_WORDS_MAX = 40
# To be split.
STILL_TOO_LONG = {"tests/store/test_message_store.py"}

# Former names, each a whole identifier, and their replacements.
BANNED_NAMES = {
    "Outlook": "DiskForecast",
    "UnconsumedLook": "the module `unconsumed`",
    "_doubt_names": "a name that says what is checked",
    "_take_up": "the action: adopt, resume, register",
    "begin_batch": "begin_turn",
    "end_batch": "end_turn",
    "finish_batch": "finish_turn",
    "forget_queues": "reset_queue_checkpoint",
    "going": "detached",
    "is_again": "is_retry",
    "is_stranger": "has_sent_frame",
    "look_at_groups": "the module `unconsumed`",
    "note_taking": "note_reader_progress",
    "others_saved": "wait_tables_saved",
    "say_if_lost": "warn_if_missing",
    "seam": "fs",
    "told": "the event: registered, reported, notified",
    "when_told": "when_registered",
    "why_no_files": "folder_problem",
    "works_aside": "use_threads",
}

# Phrases in names, comments, docstrings, messages and documents, and plainer words for them.
BANNED_PHRASES = {
    r"told": "notified, informed, reported",
    r"(go|goes|went|going) on": "continue, resume, retry",
    r"a moment later": "afterwards, soon after",
    r"by and by": "gradually",
    r"(is|are) none of": "is not one of",
    r"install 'headrace\[\w+": "the packages of the extra: headrace is not on PyPI",
    r"of whose": "a clause of its own",
    r"(try|tries|tried|trying) on": "retry, try",
    r"(take|takes|took|taken) in hand": "start, handle",
    r"strangers?": "client without a frame, foreign file",
    r"who (asks|has|holds|sends|waits|wants)": "a noun: the caller, holder, sender",
}

_NAME = re.compile(rf"\b({'|'.join(BANNED_NAMES)})\b")
_PHRASES = {
    re.compile(rf"\b{phrase}\b".replace(" ", r"[\s#]+"), re.IGNORECASE): advice
    for phrase, advice in BANNED_PHRASES.items()
}

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def banned_names(code: str) -> list[str]:
    """Former names in a module, as ``line: name: replacement``."""
    return [
        f"{line}: {name}: write {BANNED_NAMES[name]}"
        for line, name in sorted(identifiers(ast.parse(code)))
        if _NAME.fullmatch(name)
    ]


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a module defines or uses, with their lines."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        for field in ("name", "id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield line, name


def banned_phrases(text: str) -> list[str]:
    """Banned phrases in a text, as ``line: phrase: plainer words``."""
    found = [
        (text.count("\n", 0, match.start()) + 1, match.group(), advice)
        for pattern, advice in _PHRASES.items()
        for match in pattern.finditer(text)
    ]
    return [f"{line}: {phrase!r}: write {advice}" for line, phrase, advice in sorted(found)]


def long_functions(code: str) -> list[str]:
    """Functions that are too long, as ``line: name has n lines``."""
    functions = (
        (node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return [
        f"{line}: {name} has {count} lines"
        for line, name, count in functions
        if count > FUNCTION_LINES_MAX
    ]


def line_count(text: str) -> int:
    return len(text.splitlines())


def sentences(markdown: str) -> Iterator[str]:
    """Sentences of a document's text: without tables, code, headings and targets of links."""
    text = re.sub(r"^ *```.*?^ *```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"^( *\||#|<).*$", "", text, flags=re.MULTILINE)
    # A list item is a paragraph of its own.
    text = re.sub(r"^ *([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"\b(e\.g|i\.e|vs)\.", "such as", text)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?])\s+", paragraph.replace("*", "").strip())


def long_sentences(markdown: str) -> list[str]:
    """Sentences that are too long, as ``n words: sentence``."""
    return [
        f"{len(words)} words: {' '.join(words)}"
        for words in map(str.split, sentences(markdown))
        if len(words) > SENTENCE_WORDS_MAX
    ]


RULES = {
    "names": banned_names,
    "phrases": banned_phrases,
    "functions": long_functions,
    "sentences": long_sentences,
}


def check(rule: str, files: list[Path]) -> None:
    """Fail with a line for each problem that a rule finds."""
    problems = [
        f"{relative(path)}:{problem}"
        for path in files
        for problem in RULES[rule](path.read_text(encoding="utf-8"))
    ]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.mark.parametrize("folder", PRODUCT_FOLDERS)
@pytest.mark.parametrize("rule", ["names", "phrases", "functions"])
def test_the_product_is_tidy(rule: str, folder: str) -> None:
    check(rule, modules(folder))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
@pytest.mark.parametrize("rule", ["phrases", "sentences"])
def test_the_documents_are_tidy(rule: str, document: Path) -> None:
    check(rule, [document])


def test_functions_of_tests_are_short() -> None:
    check("functions", modules("tests"))


@pytest.mark.parametrize("folder", [*PRODUCT_FOLDERS, "tests"])
def test_files_are_short(folder: str) -> None:
    counts = {relative(path): line_count(path.read_text()) for path in modules(folder)}
    too_long = {path for path, count in counts.items() if count > FILE_LINES_MAX}
    # A file that was split leaves the list.
    assert too_long == {path for path in STILL_TOO_LONG if path.startswith(f"{folder}/")}


@pytest.mark.parametrize("folder", ["docs", "tests/conformance", *PRODUCT_FOLDERS])
def test_each_test_that_is_named_exists(folder: str) -> None:
    tests = [f"/{relative(path)}" for path in modules("tests")]
    named = {
        (relative(path), match)
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in {".md", ".py"}
        for match in re.findall(r"[\w/]*\btest_\w+\.py", path.read_text())
        if match != "test_jobs.py"  # an example of a user's own
    }
    gone = [each for each in named if not any(test.endswith(f"/{each[1]}") for test in tests)]
    assert sorted(gone) == []


def test_each_folder_of_tests_proves_a_promise() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    table = page.partition("## Proofs")[2].partition("\n## ")[0]
    proofs = {str(Path(proof).parent) for proof in re.findall(r"`([\w/]+\.py)`", table)}
    folders = {str(path.parent.relative_to(ROOT / "tests")) for path in modules("tests/broker")}
    assert folders - proofs == {"broker/seams"}, "these have no tests of their own"


# -- the rules find what breaks them ---------------------------------------------------------------


@pytest.mark.parametrize("name", BANNED_NAMES)
@pytest.mark.parametrize("code", ["{} = 1", "def f({}): ...", "x.{}()", "class {}: ...", "f({}=1)"])
def test_a_former_name_is_found(name: str, code: str) -> None:
    assert banned_names(f"\n{code.format(name)}\n") == [f"2: {name}: write {BANNED_NAMES[name]}"]


def test_longer_names_and_texts_are_not_former_names() -> None:
    assert not banned_names("seams = foregoing = 'seam'  # going\n")


@pytest.mark.parametrize(
    "phrase",
    [
        "The client is told of it.",
        "It goes on with the next.",
        "a moment\n    # later",
        "by and by",
        "The file is none of ours.",
        "topics of whose queues",
        "It tries on.",
        "taken in hand",
        "a Stranger",
        "Who waits gets it.",
        "pip install 'headrace[tls]'",
    ],
)
def test_a_banned_phrase_is_found_with_its_line(phrase: str) -> None:
    (found,) = banned_phrases(f"fine\nfine too\n{phrase}\n")
    assert found.startswith("3: ")


def test_each_phrase_can_be_found() -> None:
    samples = "told go on a moment later by and by is none of of whose try on take in hand stranger"
    assert len(banned_phrases(f"{samples} who has install 'headrace[tls]")) == len(BANNED_PHRASES)


@pytest.mark.parametrize("text", ["Retold.", "cargo on", "a wholesale", "strangely"])
def test_parts_of_words_are_no_phrases(text: str) -> None:
    assert not banned_phrases(text)


@pytest.mark.parametrize("head", ["def f():", "async def f():", "class A:\n  def f():"])
def test_a_long_function_is_found(head: str) -> None:
    indent = "    " if head.startswith("class") else "  "
    body = [f"{indent}pass"] * (FUNCTION_LINES_MAX - 1)
    line = 2 if head.startswith("class") else 1
    assert not long_functions("\n".join([head, *body]))
    (found,) = long_functions("\n".join([head, *body, body[0]]))
    assert found == f"{line}: f has {FUNCTION_LINES_MAX + 1} lines"


def test_lines_are_counted() -> None:
    assert line_count("a\n\nb\n") == 3


LONG = " ".join(["word"] * (SENTENCE_WORDS_MAX + 1))


@pytest.mark.parametrize(
    "markdown",
    [
        f"{LONG}.",
        f"Short. {LONG}. Short.",
        f"- item\n- {LONG}\n",
        f"1. {LONG.replace(' ', chr(10))}",
        f"**Bold.** {LONG}",
        f"```\ncode\n```\n{LONG}\n",
        f"{LONG[:60]} version 5.5 {LONG[60:]}",
        f"{LONG[:60]} e.g. {LONG[60:]}",
    ],
)
def test_a_long_sentence_is_found(markdown: str) -> None:
    assert len(long_sentences(markdown)) == 1


HALF = " ".join(["word"] * (SENTENCE_WORDS_MAX // 2 + 1))


@pytest.mark.parametrize(
    "markdown",
    [
        f"| {LONG} |",
        f"# {LONG}",
        f"```\n{LONG}\n```",
        f"  ```sh\n  {LONG}\n  ```\n",
        f"`{LONG}`",
        f"[text](folder/{LONG})",
        f"{HALF}. `code` {HALF}.",
        f"{HALF}. headrace {HALF}.",
        f"{HALF}\n\n{HALF}",
        f"- {HALF}\n- {HALF}",
        f"{HALF}:\n\n{HALF}",
    ],
)
def test_short_sentences_tables_and_code_pass(markdown: str) -> None:
    assert not long_sentences(markdown)
