"""The catalogue knows every public transformation, and docs list them all."""

from pathlib import Path

import optax
import optax_catalogue as catalogue
import pytest
from optax_judged import named_in
from optax_programs import PROGRAMS, QUICK, ROWS
from optax_recipes import NO_TRANSFORMATIONS, RECIPES

LIST = Path(__file__).parents[2] / "docs" / "optimizers_table.md"


def test_all_public_names_are_known():
    found = catalogue.transformations()
    assert {"adam", "lamb", "MultiSteps", "contrib.muon", "multi_transform"} <= set(
        found
    )
    assert not {"adam_like", "linear_schedule", "global_norm"} & set(found)
    for cases in found.values():
        for case in cases:
            assert isinstance(catalogue.built(case), optax.GradientTransformation)


def test_what_says_that_it_returns_one_is_found():
    """By the annotations of optax, whatever the catalogue makes of them."""
    named = {word for name in catalogue.public_names() for word in name.names}
    listed = set(catalogue.transformations())
    for word in dir(optax):
        said = str(getattr(getattr(optax, word), "__annotations__", {}).get("return"))
        if not word.startswith("_") and "GradientTransformation" in said:
            assert word in named
            names = next(n.names for n in catalogue.public_names() if word in n.names)
            assert listed & set(names), word


def test_no_recipe_is_left_behind():
    """A recipe or a reason for what optax no longer has is to be removed."""
    named = {word for name in catalogue.public_names() for word in name.names}
    assert set(RECIPES) <= named
    assert {word for word in NO_TRANSFORMATIONS if "*" not in word} <= named


def test_names_of_cases_differ():
    names = [case.name for case in catalogue.every_case()]
    assert len(names) == len(set(names))
    assert set(QUICK) <= {case.name for case in [*PROGRAMS, *ROWS]}


def _new(strange) -> optax.GradientTransformation:
    return optax.scale(strange)


def _new_and_unmarked(strange):
    return optax.scale(strange)


class _NewWrapper:
    def init(self, params): ...

    def update(self, updates, state, params=None): ...


@pytest.mark.parametrize("thing", [_new, _new_and_unmarked, _NewWrapper])
def test_a_transformation_that_nobody_can_build_asks_for_a_recipe(thing, monkeypatch):
    name = catalogue.Name(("new_in_optax",), thing)
    monkeypatch.setattr(catalogue, "public_names", lambda: (name,))
    with pytest.raises(catalogue.RecipeMissing, match=r"new_in_optax.*add a recipe"):
        catalogue.transformations.__wrapped__()


def test_a_new_transformation_of_known_parameters_is_tried(monkeypatch):
    def newest(learning_rate, mask=None) -> optax.GradientTransformation:
        return optax.adamw(learning_rate, mask=mask)

    name = catalogue.Name(("newest",), newest)
    monkeypatch.setattr(catalogue, "public_names", lambda: (name,))
    (cases,) = catalogue.transformations.__wrapped__().values()
    assert [case.name for case in cases] == ["newest", "newest(mask by path)"]


def test_inner_modules_are_walked():
    names = [name.public for name in catalogue.public_names()]
    assert "contrib.reduce_on_plateau" in names
    assert "experimental.aggregating.process" in names


def test_the_list_of_the_docs_names_them_all():
    assert LIST.exists(), "no docs/optimizers_table.md: make optimizers writes it"
    named = named_in(LIST.read_text())
    absent = [
        name.public
        for name in catalogue.public_names()
        if name.public in catalogue.transformations() and not named & set(name.names)
    ]
    assert not absent, f"make optimizers: docs/optimizers_table.md lacks {absent}"
