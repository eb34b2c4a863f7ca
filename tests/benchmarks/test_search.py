"""The search for defaults: beside others a configuration scores what it scores alone; the control is the default."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evalign.training.recipes import find_recipe


@pytest.fixture
def search(monkeypatch, tmp_path):
    """The module, and a folder with a table of three uneven classes under the name of a set."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import search_recipe

    generator = np.random.default_rng(0)
    y = np.arange(200) % 7 % 3
    x = generator.normal(size=(200, 3)) + np.eye(3)[y]
    np.savez(tmp_path / "yeast.npz", x=x, c=np.zeros((200, 0)), y=y)
    search_recipe.table.cache_clear()
    return search_recipe, tmp_path


@pytest.mark.slow
def test_configurations_are_searched_as_one_stack_and_no_neighbour_is_felt(search):
    module, folder = search
    recipe = find_recipe("anchored")
    chosen = next(config for config in module.GRIDS["networks"]() if config.name == "mlp")
    assert (chosen.stages, chosen.updates) == (recipe.stages, recipe.updates)
    flat = tuple(replace(stage, decay="none") for stage in chosen.stages)
    dropped = [replace(chosen, name=f"dropout {rate}", dropout=rate) for rate in (0.1, 0.35)]
    configs = [chosen, *dropped, replace(chosen, name="flat", stages=flat), replace(chosen, sets=("creditcard",))]
    units = module.stacks(["yeast"], configs, {"yeast": 2}, 100, folder)
    assert [[config.name for config in members] for _, members in units] == [
        [config.name for config in configs if config.sets is None]
    ]
    short = [
        replace(config, hidden=(8,), stages=tuple(replace(stage, epochs=4) for stage in config.stages))
        for config in units[0][1]
    ]
    together = module.run("yeast", short, 2, folder)
    assert [(row["config"], row["split"]) for row in together] == [(c.name, s) for c in short for s in range(2)]
    for i in (0, 3):
        alone = module.run("yeast", [short[i]], 2, folder)
        for ours, theirs in zip(alone, together[2 * i : 2 * i + 2], strict=True):
            for column in ("argmax", "plug_in", "log_loss", "epochs"):
                assert ours[column] == pytest.approx(theirs[column], abs=2e-5), column
    assert together[0]["log_loss"] != together[6]["log_loss"]


def test_what_is_for_one_set_is_left_out_of_others(search, monkeypatch):
    module, folder = search
    monkeypatch.setattr(module, "load", lambda name, folder: (None, None, np.zeros(2000 if name == "adult" else 1000)))
    first, *rest = module.GRIDS["networks"]()
    configs = [replace(first, name="rare", sets=("creditcard",)), *rest]
    units = module.stacks(["adult", "creditcard"], configs, {"adult": 10, "creditcard": 10}, 1000, folder)
    found = {name: {c.name for unit, members in units for c in members if unit == name} for name, _ in units}
    assert "rare" in found["creditcard"] - found["adult"]
    assert len(found["adult"]) > 1


@pytest.mark.slow
def test_networks_are_searched_and_no_neighbour_is_felt(search):
    module, folder = search
    names = ("mlp", "embedding", "embedding x8", "embedding bins=24 width=8")
    configs = [c for c in module.GRIDS["networks"]() if c.name in names]
    assert len(module.stacks(["yeast"], configs, {"yeast": 2}, 100, folder)) == 4
    for config in configs:
        short = replace(config, hidden=(8,), stages=tuple(replace(stage, epochs=3) for stage in config.stages))
        both, first = module.run("yeast", [short], 2, folder), module.run("yeast", [short], 1, folder)
        assert [row["split"] for row in both] == [0, 1]
        assert both[0]["log_loss"] == pytest.approx(first[0]["log_loss"], abs=2e-5)


def test_indicators_of_a_category_stand_together(search):
    module, _ = search
    fields = module.fields_of(np.arange(12.0).reshape(6, 2), "both", [3, 2])
    assert (fields.features, fields.numbers, fields.categories) == (9, (1, 3), ((4, 7), (7, 9)))
