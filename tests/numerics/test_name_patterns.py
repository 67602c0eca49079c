"""Patterns mean what they mean in the standard library, and end."""

from __future__ import annotations

import fnmatch
import re
import time

import pytest

from quantkit.errors import SchemeError
from quantkit.numerics import name_patterns
from quantkit.numerics.dtype import INT8
from quantkit.numerics.name_patterns import Budget, check_for_others, check_pattern, is_exact, matches
from quantkit.numerics.scheme import LinearScheme, Rule, Scheme, WeightScheme

EIGHT = LinearScheme(weight=WeightScheme(dtype=INT8))
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.11.self_attn.q_proj", "lm_head", "a{e}", "a[b]", "a", "", "ab")
GLOBS = ("*", "*.up_proj", "model.layers.?.*", "a[[]b]", "[!l]*", "a{e}", "lm_head", "*[0-9][0-9]*", "[", "a*b*", "[]]")
EXPRESSIONS = (
    *(r".*\.(up|q)_proj", r"model\.layers\.(0|1)\..*", r"(?:.*\.)?lm_head", r"a\{e\}", r"(?i)LM_HEAD", r"(?P<x>a)b?"),
    *(r"\w+(?=d)\w", r"a{1,2}b*", r"a{,1}b?", r"[^.]{2}", r"(?s:.)+", r"a{}", r"[{}]?a", r"a[\[b]*\]|ab|a", r"\Aa\Z"),
)
# With `re`, each of these takes longer than a test may.
ENDLESS = (
    *(r"(x+x+)+y", r"(.*?,){100}q", r"((a{1,20}){1,20}){1,20}b", r"(a|a|aa)*(b|c)*\1d", r"((a+)?.?)*z(?!a)"),
    *(r"(.|..|...)*(.|..)*(.|..)*[^axq,]", r"(?:(?:.?){30}){30}(?<=q{3})q"),
)


def seconds(act) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


@pytest.mark.parametrize("glob", GLOBS)
def test_shell_patterns_are_those_of_fnmatch(glob):
    for name in NAMES:
        assert matches(glob, name, Budget()) == fnmatch.fnmatchcase(name, glob)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_those_of_the_standard_library(expression):
    for name in NAMES:
        assert matches(f"re:{expression}", name, Budget()) == (re.fullmatch(expression, name) is not None)


@pytest.mark.parametrize("expression", ENDLESS)
def test_every_expression_ends(expression, monkeypatch):
    monkeypatch.setattr(name_patterns, "_MATCH_S", 0.2)

    def ask():
        for name in ("x" * 100_000, "a" * 3000, "a," * 3000, "q" * 3000):
            try:
                matches(f"re:{expression}", name, Budget())
            except SchemeError as error:
                assert "takes too long to match" in str(error) and expression[:20] in str(error)

    assert seconds(ask) < 10


def test_all_patterns_of_a_scheme_share_one_time(monkeypatch):
    monkeypatch.setattr(name_patterns, "_MATCH_S", 0.1)
    scheme = Scheme(default=EIGHT, rules=(Rule(pattern=r"re:(x+x+)+y", linear=None),))
    scheme._budget.seconds = 0.05
    with pytest.raises(SchemeError, match="takes too long"):
        scheme.find("x" * 10_000)
    assert scheme._budget.seconds < 0.01  # what is left is counted by another clock
    with pytest.raises(SchemeError, match="takes too long"):  # nothing is left, for any name
        list(scheme.unmatched(["x" * 10_000, "x" * 9_999]))


def test_many_stars_are_no_bomb():
    assert seconds(lambda: matches("*a" * 400 + "*b", "a" * 100_000, Budget())) < 5


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("(", "not a valid regular expression"),
        ("a{e<=3}", "means different things"),
        ("a{s}", "means different things"),
        pytest.param(
            "[[:alpha:]]", "means different things", marks=pytest.mark.filterwarnings("ignore:Possible nested")
        ),
        (r"\\{e}", "means different things"),
        (r"\p{L}", "bad escape"),
        (r"(a)(?R)", "not a valid regular expression"),
        (r"(?V1)a", "not a valid regular expression"),
        ("(?:(?:a{1000}){1000}){1000}", "product of its counts in braces is over 10000"),
        ("a{1000000000000}", "not a valid regular expression"),
        ("(" * 400 + ")" * 400, "not a valid regular expression"),
        ("a" * 1001, "at most 1000 are allowed"),
    ],
)
def test_what_another_engine_reads_otherwise_is_refused(expression, why):
    with pytest.raises(SchemeError) as caught:
        check_pattern(f"re:{expression}")
    assert why in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_name_is_no_expression_however_long():
    assert is_exact("x" * 5000)
    assert matches("x" * 5000, "x" * 5000, Budget())


def test_too_many_expressions_are_refused_and_names_are_not():
    Scheme(default=None, rules=tuple(Rule(pattern=f"a.{i}", linear=EIGHT) for i in range(20_000)))
    with pytest.raises(SchemeError, match="4097 patterns with wildcards are too many"):
        Scheme(default=None, rules=tuple(Rule(pattern=f"*a{i}", linear=EIGHT) for i in range(4097)))


def test_as_many_names_as_a_large_mixture_has_are_found_at_once():
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(48) for j in range(128)]
    scheme = Scheme(default=None, rules=tuple(Rule(pattern=name, linear=EIGHT) for name in names))
    assert seconds(lambda: [scheme.find(name) for name in names]) < 2
    assert scheme.find(names[-1]) is EIGHT
    assert scheme.find("other") is None
    assert [rule.pattern for rule in scheme.unmatched(names[1:])] == [names[0]]


@pytest.mark.parametrize("text", ["re:(a+)+$", "re:(a|a)*b", "re:.*a.*b.*c.*d.*e", "a?" * 30, "(a|a)" * 30, "x" * 2000])
def test_other_libraries_get_no_endless_expression(text):
    for section in ({"ignore": [text]}, {"config_groups": {"g": {"targets": [text]}}}, {"dynamic": {text: {}}}):
        with pytest.raises(SchemeError, match="may take forever"):
            check_for_others({"text_config": {"quantization_config": section}})


def test_other_libraries_get_what_people_write():
    usual = ["re:.*lm_head", "re:.*mlp.gate$", r"re:(.*\.)?visual\..*", "re:.*(q|k|v|gate|up|down)_proj$", "lm_head"]
    assert check_for_others({"quantization_config": {"ignore": usual}, "note": "(a+)+"}) is None
