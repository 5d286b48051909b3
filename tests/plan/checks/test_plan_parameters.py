"""What a signature says of a parameter, its type and its range, is checked before anything runs."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveFloat

from tandem.algorithms import ADVANTAGES, DISTILLATIONS, POLICY_LOSSES, PREFERENCE_LOSSES
from tandem.base.errors import Problem
from tandem.base.registry import Parameter, read_signature
from tandem.config.tree import type_text
from tandem.plan.checks.parameters import check_type, readable, spelled

Problems = Callable[..., list[Problem]]
LOSS, ESTIMATOR = "algorithm.policy_loss", "algorithm.adv_estimator"
REGISTRIES = (ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, DISTILLATIONS)
ANY_NUMBER = {"clip_cov_lb", "clip_cov_ub", "weights", "simpo gamma"}
"""Covariances, weights and a margin may have any sign."""


def all_parameters() -> Iterator[tuple[str, Parameter]]:
    for registry in REGISTRIES:
        for name in registry.names():
            if registry[name].target.__module__.startswith("tandem."):
                yield from ((f"{name} {p.name}", p) for p in registry[name].signature.parameters.values())


@pytest.mark.parametrize(
    ("where", "parameter"), list(all_parameters()), ids=lambda value: value if type(value) is str else ""
)
def test_each_number_has_a_range_and_what_lies_outside_is_refused(where: str, parameter: Parameter) -> None:
    annotation = readable(parameter.annotation)
    assert annotation is not None
    if not parameter.required:
        assert list(check_type("key", parameter.default, parameter)) == []
    words = type_text(annotation)
    if not {"number", "integer"} & set(words.split()) or {where, parameter.name} & ANY_NUMBER:
        return
    outside = [-1] if "integer" in words else [float("nan"), -1e-3]
    if ">" in words.split():
        outside.append(0)
    if "<=" in words.split() or "<" in words.split():
        outside.append(1.01)
    for value in outside:
        (problem,) = check_type("key", value, parameter)
        assert "must be" in problem.reason or "finite" in problem.reason
        assert problem.remedy.startswith("Write a")


REFUSED = [
    (f"{LOSS}={{type: sapo, tau_neg: 0}}", f"{LOSS}.tau_neg", "must be > 0"),
    (f"{LOSS}={{type: dro, dro_beta: -1}}", f"{LOSS}.dro_beta", "must be > 0"),
    (f"{LOSS}={{type: kl_cov, kl_cov_ratio: 1.5}}", f"{LOSS}.kl_cov_ratio", "must be <= 1"),
    (f"{LOSS}={{type: kl_cov, ppo_kl_coef: -1}}", f"{LOSS}.ppo_kl_coef", "must be >= 0"),
    (f"{LOSS}={{type: decoupled_ppo, behaviour_cap: 0}}", f"{LOSS}.behaviour_cap", "must be > 0"),
    (f"{LOSS}={{type: m2po, m2_threshold: 0}}", f"{LOSS}.m2_threshold", "must be > 0"),
    (f"{LOSS}={{type: dppo_tv, clip_ratio_c: 0}}", f"{LOSS}.clip_ratio_c", "bounds the ratio"),
    (f"{LOSS}={{type: clip_cov, clip_cov_lb: 6}}", f"{LOSS}.clip_cov_lb", "between 6 and 5"),
    (f"{LOSS}={{type: clip_cov, clip_cov_ub: 0.5}}", f"{LOSS}.clip_cov_ub", "between 1 and 0.5"),
    (f"{LOSS}.clip_ratio=.nan", f"{LOSS}.clip_ratio", "not a finite number"),
    (f"{ESTIMATOR}={{type: grpo, epsilon: 0}}", f"{ESTIMATOR}.epsilon", "must be > 0"),
    (f"{ESTIMATOR}={{type: gpg, f_norm: 0}}", f"{ESTIMATOR}.f_norm", "must be > 0"),
    (f"{ESTIMATOR}={{type: reinforce_plus_plus, gamma: 1.1}}", f"{ESTIMATOR}.gamma", "must be <= 1"),
]


@pytest.mark.parametrize(("words", "key", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
def test_the_plan_refuses(problems_of: Problems, words: str, key: str, reason: str) -> None:
    (problem,) = problems_of(words)
    assert problem.key == key and reason in problem.reason


def test_a_bound_of_the_weight_of_one_is_no_dual_clip(problems_of: Problems) -> None:
    assert problems_of(f"{LOSS}={{type: dppo_tv, clip_ratio_c: 1.0}}") == []


@pytest.mark.parametrize(
    ("weights", "reason"),
    [("[1.0]", "1 weights"), ("[0, 0]", "all parts weigh 0"), ("[1, x]", "a text"), ("[1, 0]", "")],
)
def test_the_weights_of_the_parts_of_a_reward(problems_of: Problems, weights: str, reason: str) -> None:
    parts = "reward_manager={type: weighted_sum, parts: [{type: exact}, {type: keyword, keyword: x}]}"
    found = problems_of(parts, f"{ESTIMATOR}={{type: gdpo, weights: {weights}}}")
    assert [problem.key.partition("[")[0] for problem in found] == [f"{ESTIMATOR}.weights"] * bool(reason)
    assert all(reason in problem.reason for problem in found)


Isolation = Literal["process", "container"]
Share = Annotated[float, Field(gt=0, le=1, description="it is a part of the whole")]
Written = "Isolation | None"


def configured(
    *,
    isolation: Isolation = "process",
    written: Written = None,
    share: Share = 1.0,
    shares: list[Share] = [],  # noqa: B006
    quoted: "Annotated[int, Field(ge=2)]" = 2,  # noqa: UP037
) -> None:
    """Of aliases."""


@pytest.mark.parametrize(
    ("name", "value", "key", "reason", "remedy"),
    [
        ("isolation", "proces", "key", "not one of the choices", "Did you mean 'process'?"),
        ("written", "foo", "key", "not one of the choices", "Known: container, process"),
        ("share", 0, "key", "must be > 0: it is a part of the whole", "a number > 0 and <= 1"),
        ("shares", [0.5, 2], "key[1]", "must be <= 1", "a number > 0 and <= 1"),
        ("quoted", 1, "key", "must be >= 2", "an integer >= 2"),
    ],
)
def test_aliases_are_followed(name: str, value: object, key: str, reason: str, remedy: str) -> None:
    (problem,) = check_type("key", value, read_signature(configured).parameters[name])
    assert problem.key == key and reason in problem.reason and remedy in problem.remedy


@pytest.mark.parametrize(
    ("text", "value", "fits"),
    [
        ("Annotated[float, Field(gt=0)] | None", 0.0, False),
        ("Annotated[float, Field(gt=0)] | None", None, True),
        ("typing.Annotated[int, annotated_types.Ge(1)]", 0, False),
        ("pydantic.PositiveFloat", -1.0, False),
        ("Fraction", 1.5, False),
        ("list[NonNegativeInt]", [1, -1], False),
        ("Optional[float]", None, True),
        ("Annotated[Somebody, Field(gt=0)]", -1, True),
    ],
)
def test_ranges_are_read_from_source_that_is_not_run(text: str, value: object, fits: bool) -> None:
    assert (not list(check_type("key", value, Parameter("p", None, text, True)))) == fits


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (PositiveFloat, "float > 0"),
        (Share, "float > 0 and <= 1"),
        (typing.Optional[Share], "float > 0 and <= 1 | None"),  # noqa: UP045
        (dict[str, list[int]], "dict[str, list[int]]"),
        (Isolation, "Literal['process', 'container']"),
        ("torch.dtype", "torch.dtype"),
    ],
)
def test_the_pages_write_a_type_with_its_range(annotation: Any, text: str) -> None:
    assert spelled(annotation) == text
