"""Configs at the printed budget against the table of the papers' settings, and the words for what falls short."""

from dataclasses import replace

import pytest

from evalign_papers.engine.cells import Cell
from evalign_papers.engine.printed import PACKAGED
from evalign_papers.engine.reports import Report, TrialReport
from evalign_papers.engine.settings import PRINTED, UNBOUNDED, printed_settings, reductions

PRINTED_CONFIGS = sorted(PACKAGED.glob("*/*/paper/*@printed.json"))


def test_the_table_is_what_the_texts_say():
    """EAST E.1 and E.4, MF Sec. 6, BtG supplement 4.2 and 4.3, typed again from the texts."""
    east = PRINTED["east", "table"]
    assert east.learning_rate == (0.01, 0.001, 0.0001)
    assert east.batch_size == (128, 256, 512, 1024, 2048)
    assert PRINTED["east", "creditcard"].batch_size[-2:] == (4096, 8192)
    assert PRINTED["east", "cifar10"].batch_size == (32, 64, 128, 256)
    assert PRINTED["east", "caltech256"].batch_size == (32, 64)
    assert (east.dropout, east.rate, east.patience, east.trials) == ((0.25, 0.5), (0.8, 0.9), 50, 10)
    assert PRINTED["mf", "table"].patience == PRINTED["btg", "table"].patience == 100
    assert (PRINTED["btg", "table"].learning_rate, PRINTED["btg", "table"].batch_size) == ((1e-3,), (1024,))
    graphs = PRINTED["btg", "graphs"]  # "Using the hyperparameters proposed by Thompson et al."
    assert (graphs.learning_rate, graphs.batch_size, graphs.patience) == ((), (), 100)
    assert (PRINTED["btg", "images"].learning_rate, PRINTED["btg", "images"].batch_size) == ((1e-4,), (128,))


@pytest.mark.parametrize("path", PRINTED_CONFIGS, ids=lambda path: "/".join(path.parts[-4:]))
def test_printed_configs_state_every_number_of_the_protocol(path):
    config = Cell(path).config
    printed = printed_settings(config)
    assert printed is not None
    assert reductions(config) == []
    assert config.grid is not None
    assert config.training is not None
    assert config.network is not None
    assert config.grid.learning_rate == printed.learning_rate
    assert config.grid.batch_size == printed.batch_size
    assert config.grid.dropout == printed.dropout
    assert config.grid.rate == (printed.rate if config.method.name == "metric" else ())
    assert (config.grid.select, config.grid.search) == ("loss", "once")
    for stage in config.training.stages:
        assert (stage.patience, stage.epochs, stage.temperature) == (printed.patience, UNBOUNDED, 0.2)
    assert config.trials == printed.trials
    if config.network.kind == "mlp":
        assert config.network.hidden == (512, 256, 128)
    else:
        assert config.network.kind == "darknet19"


def test_released_configs_have_the_budget_of_the_released_code():
    """BtG's training script: patience 100, 5000 epochs; 3e-4 and batches of 20 for AP-Perf ("params from author")."""
    found = sorted(PACKAGED.glob("btg/*/paper/*@released.json"))
    assert len(found) > 100
    for path in found:
        config = Cell(path).config
        assert config.training is not None
        (stage,) = config.training.stages
        assert (stage.patience, stage.epochs, config.trials) == (100, 5000, 10), path.name
        of_ap_perf = config.method.name == "ap_perf"
        assert stage.learning_rate == (3e-4 if of_ap_perf else 1e-3)
        assert config.training.batch_size == 20 or not of_ap_perf
        assert reductions(config) == ["at most 5000 epochs"]
        trials = [TrialReport(i, i, {}, 700, 1.0, {}) for i in range(10)]
        assert reductions(config, Report(config, trials)) == []  # no trial reached the bound


def test_every_table_of_east_and_mf_has_a_printed_config():
    named = {"/".join(path.parts[-4:]) for path in PRINTED_CONFIGS}
    for dataset in ("cocktailparty", "adult", "mammography", "creditcard"):
        for cell in ("f1", "accuracy", "mcc", "dice", "ce"):
            assert f"east/1/paper/{dataset}.{cell}@printed.json" in named
        for cell in ("f1", "ce"):
            assert f"mf/2/paper/{dataset}.{cell}@printed.json" in named
    for dataset in ("cifar10", "caltech256"):
        for cell in ("f1", "accuracy", "mcc", "dice", "ce"):
            assert f"east/1/paper/{dataset}.{cell}@printed.json" in named


def test_reductions_are_put_into_words():
    config = Cell(PACKAGED / "east/1/paper/creditcard.f1.json").config
    words = reductions(config)
    assert words == [
        "patience 5 of 50",
        "at most 40 epochs",
        "learning rate 0.001, 0.0001 of 0.01, 0.001, 0.0001",
        "batch size 1024 of 128, 256, 512, 1024, 2048, 4096, 8192",
        "dropout 0.25 of 0.25, 0.5",
    ]
    trials = [TrialReport(i, i, {}, epochs, 1.0, {}) for i, epochs in enumerate((40, 40, 12))]
    found = reductions(config, Report(config, trials))
    assert "at most 40 epochs, reached by 2 of 3 trials" in found
    assert "3 of 10 trials" in found
    assert not any("epochs" in word for word in reductions(config, Report(config, trials[2:])))
    assert reductions(replace(config, protocol="honest")) == []
    btg = Cell(PACKAGED / "btg/1/paper/adult.f1.json").config
    assert reductions(btg) == []
    assert "cooling rate 0.9 of 0.8, 0.9" in reductions(Cell(PACKAGED / "east/1/paper/cifar10.f1.json").config)
    forest = Cell(PACKAGED / "east/1/paper/adult.forest.json").config  # no network: its trials are all that is printed
    assert reductions(forest) == []
    assert reductions(replace(forest, trials=3)) == ["3 of 10 trials"]
