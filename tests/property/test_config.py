"""Settings and command lines of any content: taken, or refused in one way."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvadmit import cli
from kvadmit.config import Settings, as_table
from kvadmit.errors import ConfigError

KEYS = [row[0] for row in as_table()]
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
SIZES = st.from_regex(r"-?[0-9]{0,4}(\.[0-9]{1,2})? ?(GiB|MiB|kb|k|ms|min|h)?", fullmatch=True)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=9), JSON | SIZES, max_size=4))
def test_settings_are_read_or_refused_as_such(wanted: dict[str, Any]) -> None:
    try:
        settings = Settings.parse(wanted)
    except ConfigError:
        return
    assert Settings.parse(settings.as_mapping()) == settings


WORDS = st.sampled_from(
    ["status", "doctor", "top", "explain", "--json", "--help", "--run-dir", "--pause", "-x", ""]
)


@given(st.lists(WORDS | st.text(st.characters(exclude_characters="\0"), max_size=9), max_size=4))
def test_a_command_line_of_any_words_ends_with_a_status(words: list[str]) -> None:
    """Never in a traceback. The commands that look at a host get one that is not there."""
    told = ["--run-dir", "/nonexistent/kvadmit"] if words[:1] != ["explain"] else []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            status: Any = 0 if "top" in words else cli.main([*words, *told])
        except SystemExit as end:
            status = end.code
    assert status in (0, 1, 2)
