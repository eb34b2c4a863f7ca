"""The comparison: protocol, rules, summaries and intervals, against scikit-learn, scipy and plain loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import sem
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.dummy import DummyClassifier
from sklearn.metrics import f1_score, fbeta_score, matthews_corrcoef, precision_score, recall_score
from sklearn.naive_bayes import GaussianNB
from threadpoolctl import threadpool_info, threadpool_limits

from evalign import decision
from evalign.comparison import contenders as c
from evalign.comparison.contenders import Contender, HeldOut
from evalign.comparison.goals import Aim, Judge
from evalign.comparison.run import Table, compare, evaluate, split
from evalign.comparison.significance import interval, resampled_matrices, resampled_scores, standard_error, summarise
from evalign.training.recipes import find_recipe

SMALL: dict[str, Any] = {"hidden": (16,), "epochs": 4, "device": "cpu"}


def words(y: Any, names: tuple[str, ...]) -> Any:
    return np.array(names, dtype=object)[y]


@pytest.fixture(scope="module")
def iris() -> Table:
    X, y = load_iris(return_X_y=True)
    return Table(X, words(y, ("setosa", "versicolor", "virginica")))


@pytest.fixture(scope="module")
def cancer() -> Table:
    X, y = load_breast_cancer(return_X_y=True)
    return Table(X[:300, :6], words(y[:300], ("malignant", "benign")))


def naive_bayes(*decisions: str) -> Contender:
    return Contender("bayes", "naive Bayes", lambda seed: GaussianNB(), decisions or ("argmax", "tuned", "plug_in"))


# -- judge ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positive", [None, "benign", "malignant"])
def test_score_is_scikit_learns_for_either_positive_label(cancer: Table, positive: str | None) -> None:
    judge = Judge(Aim("f1", positive=positive), cancer.y)
    predicted = np.roll(cancer.y, 3)
    matrix = judge.confusion(judge.codes(cancer.y), judge.codes(predicted))
    assert judge.score(matrix) == pytest.approx(
        f1_score(cancer.y, predicted, pos_label=positive or "malignant"), abs=1e-12
    )
    assert judge.classes[1] == (positive or "malignant")


def test_beta_and_constraint_by_label() -> None:
    y = np.array(["ant", "bee", "cat"] * 20)
    predicted = np.roll(y, 1)
    predicted[:30] = y[:30]
    judge = Judge(Aim("fbeta", beta={"cat": 3.0}, subject_to=("recall[bee] >= 0.2", "precision >= 0.9")), y)
    matrix = judge.confusion(judge.codes(y), judge.codes(predicted))
    each = [
        fbeta_score(y, predicted, beta=beta, labels=[name], average="macro")
        for name, beta in [("ant", 1.0), ("bee", 1.0), ("cat", 3.0)]
    ]
    assert judge.score(matrix) == pytest.approx(np.mean(each), abs=1e-12)
    limits = judge.limits(matrix)
    assert limits["recall[bee] >= 0.2"] == pytest.approx(recall_score(y, predicted, average=None)[1], abs=1e-12)
    assert limits["precision >= 0.9"] == pytest.approx(precision_score(y, predicted, average="macro"), abs=1e-12)
    assert judge.missed(limits) == ["precision >= 0.9"]


def test_scores_of_many_matrices_are_those_of_each() -> None:
    matrices = np.random.default_rng(0).integers(0, 9, (7, 3, 3))
    for metric in ("f1", "mcc", "quadratic_kappa", lambda confusion: confusion.tp[0] / confusion.total):
        judge = Judge(Aim(metric), [0, 1, 2])
        assert judge.scores(matrices) == pytest.approx([judge.score(matrix) for matrix in matrices], abs=1e-12)


def test_mcc_of_a_matrix_is_scikit_learns() -> None:
    rng = np.random.default_rng(1)
    truth, predicted = rng.integers(0, 3, 50), rng.integers(0, 3, 50)
    judge = Judge(Aim("mcc"), [0, 1, 2])
    assert judge.score(judge.confusion(truth, predicted)) == pytest.approx(matthews_corrcoef(truth, predicted))


@pytest.mark.parametrize(
    ("aim", "message"),
    [
        (Aim("f1", average="binary"), "two classes"),
        (Aim("f1", positive="setosa"), "two classes"),
        (Aim("fbeta", beta={"setos": 2.0}), "did you mean 'setosa'"),
        (Aim("f1", subject_to=("recall[dog] >= 0.5",)), "class in"),
        (Aim("f2"), "did you mean 'fbeta'"),
        (Aim("f1", subject_to=("mcc[setosa] >= 0.5",)), "no score per class"),
    ],
)
def test_wrong_aims_are_told_before_training(iris: Table, aim: Aim, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Judge(aim, iris.y)


def test_unknown_label_is_named(iris: Table) -> None:
    with pytest.raises(ValueError, match="got 'rose'"):
        Judge(Aim(), iris.y).codes(["setosa", "rose"])


# -- protocol ---------------------------------------------------------------------------------------------------------


def test_split_is_stratified_and_parts_do_not_meet(iris: Table) -> None:
    numbered = Table(np.arange(150.0).reshape(-1, 1), iris.y)
    development, test = split(numbered, 0.2, seed=3)
    assert not set(development.X.ravel()) & set(test.X.ravel())
    assert np.unique(test.y, return_counts=True)[1].tolist() == [10, 10, 10]
    again = split(numbered, 0.2, seed=3)[1]
    assert again.X.tolist() == test.X.tolist()
    assert split(numbered, 0.2, seed=4)[1].X.tolist() != test.X.tolist()


def test_network_and_trees_hold_out_the_same_rows(cancer: Table) -> None:
    for positive in ("benign", "malignant"):
        judge = Judge(Aim("f1", positive=positive), cancer.y)
        network = c.ours(judge, **SMALL, folds=1).make(7).fit(cancer.X, cancer.y)
        other = HeldOut(estimator=GaussianNB(), pos_label=positive, random_state=7).fit(cancer.X, cancer.y)
        assert network.held_out_predictions_.labels.tolist() == other.held_out_predictions_.labels.tolist()
        means = [[column["shift"] for column in m.encoder_.to_json()["columns"]] for m in (network, other)]
        assert means[0] == means[1]  # learned from the same training rows


@pytest.mark.parametrize(("rows", "one"), [(c.ONE_THREAD_ROWS, True), (2 * c.ONE_THREAD_ROWS, False)])
def test_rivals_get_one_openmp_thread_on_small_tables(rows: int, one: bool) -> None:
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp"]

    seen: list[list[int]] = []

    class Spy(GaussianNB):
        def fit(self, X: Any, y: Any) -> Any:
            seen.append(threads())
            return super().fit(X, y)

    with threadpool_limits(2, "openmp"):
        before = threads()
        HeldOut(estimator=Spy(), random_state=0).fit(np.arange(float(rows)).reshape(-1, 1), np.arange(rows) % 2)
        assert threads() == before
    assert seen == [[1] * len(before) if one else before]


def test_no_test_row_is_seen_before_the_end(iris: Table) -> None:
    seen: list[Any] = []

    class Spy(GaussianNB):
        def fit(self, X: Any, y: Any) -> Any:
            seen.append(("fit", len(X)))
            return super().fit(X, y)

        def predict_proba(self, X: Any) -> Any:
            seen.append(("predict", len(X)))
            return super().predict_proba(X)

    development, test = split(iris, 0.2, seed=0)
    evaluate(Contender("spy", "spy", lambda seed: Spy()), development, test, Judge(Aim(), iris.y), seed=0)
    assert seen[0][0] == "fit"
    assert [what for what, _ in seen] == ["fit", "predict", "predict"]  # validation rows, then test rows, once
    assert seen[0][1] + seen[1][1] == len(development)
    assert seen[2][1] == len(test)


def test_rules_are_learned_on_held_out_rows_by_the_decision_functions(iris: Table) -> None:
    development, test = split(iris, 0.3, seed=0)
    judge = Judge(Aim("f1"), iris.y)
    trial = evaluate(naive_bayes(), development, test, judge, seed=0)
    held_out = trial.estimator.held_out_predictions_
    options = {"average": "macro", "sample_weight": held_out.weight}
    assert trial.rules["plug_in"] == decision.plug_in(held_out.probabilities, "f1", **options)
    assert trial.rules["tuned"] == decision.tuned(held_out.probabilities, held_out.labels, "f1", **options)
    names = judge.classes
    for row in trial.rows(judge):
        predicted = names[trial.predictions[row.decision]]
        assert row.score == pytest.approx(f1_score(test.y, predicted, average="macro"), abs=1e-12)
    assert trial.predictions["argmax"].tolist() == trial.probabilities.argmax(1).tolist()


def test_our_row_is_what_the_saved_classifier_predicts(cancer: Table) -> None:
    development, test = split(cancer, 0.3, seed=1)
    judge = Judge(Aim("f1", positive="benign"), cancer.y)
    trial = evaluate(c.ours(judge, **SMALL), development, test, judge, seed=1)
    assert judge.classes[trial.predictions["auto"]].tolist() == trial.estimator.predict(test.X).tolist()
    assert trial.rules["auto"] == judge.rule("auto", trial.estimator.held_out_predictions_)
    [row] = [row for row in trial.rows(judge) if row.decision == "auto"]
    assert row.score == pytest.approx(trial.estimator.score(test.X, test.y), abs=1e-12)


def test_majority_is_the_dummy_classifier(cancer: Table) -> None:
    development, test = split(cancer, 0.2, seed=0)
    judge = Judge(Aim("f1", average="macro"), cancer.y)
    [row] = evaluate(c.MAJORITY, development, test, judge, seed=0).rows(judge)
    dummy = DummyClassifier(strategy="most_frequent").fit(development.X, development.y)
    assert row.score == pytest.approx(f1_score(test.y, dummy.predict(test.X), average="macro"), abs=1e-12)


def test_cross_entropy_is_trained_as_long_as_its_rival() -> None:
    assert c.as_long_as(find_recipe("anchored")) == find_recipe("cross_entropy")
    for name in ("anchored", "paper", "btg"):
        recipe, rival = find_recipe(name), c.as_long_as(find_recipe(name))
        assert not any(stage.metric for stage in rival.stages)
        for epochs in (None, 10):
            assert rival.limited(epochs).epochs == recipe.limited(epochs).epochs
            assert (
                rival.limited(epochs).for_rows(10**6, 1024).epochs
                == recipe.limited(epochs).for_rows(10**6, 1024).epochs
            )


# -- compare and summarise --------------------------------------------------------------------------------------------


def test_summary_is_numpys_mean_and_scipys_standard_error(iris: Table) -> None:
    result = compare(iris.X, iris.y, lambda judge: [naive_bayes(), c.MAJORITY], Aim("f1"), splits=4)
    assert len(result.rows) == 4 * (3 + 1)
    lines = summarise(result.rows, ("bayes", "plug_in"))
    assert [line.mean for line in lines] == sorted((line.mean for line in lines), reverse=True)
    by_key = {(line.contender, line.decision): line for line in lines}
    ours, dummy = by_key["bayes", "plug_in"], by_key["majority", "argmax"]
    scores = [row.score for row in result.rows if (row.contender, row.decision) == ("bayes", "plug_in")]
    assert ours.scores == tuple(scores)
    assert ours.mean == pytest.approx(np.mean(scores))
    assert ours.error == pytest.approx(sem(scores))
    assert ours.difference == 0
    gaps = np.subtract(ours.scores, dummy.scores)
    assert dummy.difference == pytest.approx(gaps.mean())
    assert dummy.difference_error == pytest.approx(sem(gaps))
    assert ours.confusion.sum() == 4 * 30


def test_one_split_has_no_standard_error() -> None:
    assert standard_error([0.5]) is None


def test_reference_must_be_there(iris: Table) -> None:
    result = compare(iris.X, iris.y, [naive_bayes("argmax")], Aim("f1"), splits=1)
    with pytest.raises(ValueError, match="reference"):
        summarise(result.rows, ("ours", "plug_in"))


def test_given_test_rows_stay_the_same_in_every_split(iris: Table) -> None:
    development, test = split(iris, 0.2, seed=0)
    result = compare(development.X, development.y, [naive_bayes("argmax")], Aim("f1"), splits=2, test=(test.X, test.y))
    assert [row.confusion.sum() for row in result.rows] == [30, 30]
    assert result.trials[0].truth.tolist() == Judge(Aim(), iris.y).codes(test.y).tolist()


def test_interrupted_comparison_keeps_complete_splits(iris: Table) -> None:
    started: list[int] = []

    def make(seed: int) -> Any:
        started.append(seed)
        if len(started) == 3:
            raise KeyboardInterrupt
        return GaussianNB()

    result = compare(iris.X, iris.y, [Contender("bayes", "bayes", make, ("argmax",))], Aim("f1"), splits=5)
    assert result.interrupted
    assert result.splits == 2
    assert len(result.rows) == 2
    with pytest.raises(KeyboardInterrupt):  # before the first split is complete there is nothing to keep
        compare(iris.X, iris.y, [naive_bayes()], Aim("f1"), interrupted=lambda: True)


def test_steps_are_announced(iris: Table) -> None:
    steps: list[tuple[str, int]] = []
    epochs: list[int] = []

    def on_step(title: str, number: int) -> Any:
        steps.append((title, number))
        return lambda epoch: epochs.append(epoch.epoch)

    compare(
        iris.X, iris.y, lambda judge: [replace(c.ours(judge, **SMALL), decisions=("argmax",))], Aim("f1"),
        splits=2, on_step=on_step,
    )  # fmt: skip
    assert steps == [("ours (anchored)", 0), ("ours (anchored)", 1)]
    assert epochs == [1, 2, 3, 4, 1, 2, 3, 4]


# -- intervals --------------------------------------------------------------------------------------------------------


def test_intervals_are_those_of_resampling_rows_class_by_class() -> None:
    rng = np.random.default_rng(0)
    truth = np.repeat([0, 1, 2], [100, 40, 20])
    predicted = np.where(rng.random(160) < 0.7, truth, rng.integers(0, 3, 160))
    judge = Judge(Aim("f1"), [0, 1, 2])
    ours = resampled_scores(truth, {"a": predicted}, 3, judge.scores, repeats=4000)["a"]
    loop = []
    for _ in range(300):
        rows = np.concatenate([rng.choice(np.flatnonzero(truth == k), (truth == k).sum()) for k in range(3)])
        loop.append(f1_score(truth[rows], predicted[rows], average="macro"))
    assert ours.mean() == pytest.approx(np.mean(loop), abs=0.008)
    assert interval(ours) == pytest.approx(interval(np.array(loop)), abs=0.025)


def test_contenders_are_resampled_together() -> None:
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 3, 300), rng.integers(0, 3, 300)
    judge = Judge(Aim("f1"), [0, 1, 2])
    scores = resampled_scores(truth, {"a": predicted, "b": predicted.copy()}, 3, judge.scores, repeats=50)
    assert (scores["a"] == scores["b"]).all()
    assert scores["a"].std() > 0
    again = resampled_scores(truth, {"a": predicted, "b": predicted.copy()}, 3, judge.scores, repeats=50)
    assert (scores["a"] == again["a"]).all()


def test_resampled_matrices_keep_class_sizes_and_the_mean() -> None:
    matrix = np.array([[30, 10, 0], [5, 5, 0], [0, 1, 9]])
    draws = np.concatenate(list(resampled_matrices(matrix, repeats=3000)))
    assert len(draws) == 3000
    assert (draws.sum(axis=2) == matrix.sum(axis=1)).all()
    assert draws.mean(axis=0) == pytest.approx(matrix, abs=0.25)
