"""MetricDecision: scikit-learn's checks, its tools, and its counterpart for two classes."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_iris, make_multilabel_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score, f1_score, fbeta_score, precision_score, recall_score
from sklearn.model_selection import (
    GridSearchCV,
    RepeatedStratifiedKFold,
    ShuffleSplit,
    StratifiedKFold,
    StratifiedShuffleSplit,
    TunedThresholdClassifierCV,
    cross_val_predict,
    cross_val_score,
    train_test_split,
)
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from evalign.decision import calibrated, plug_in, tuned
from evalign.decision.learned import DECISIONS
from evalign.estimators.metric_decision import MetricDecision


@pytest.mark.slow
@parametrize_with_checks([MetricDecision(LogisticRegression())])
def test_scikit_learns_checks(estimator, check):
    if check.func.__name__ == "check_classifiers_train":  # also asks that labels be those of the largest probability
        estimator.set_params(decision="argmax")
    check(estimator)


@pytest.fixture(scope="module")
def two_classes():
    """Labels drawn from a logistic model, a tenth of them positive: the classifier can be calibrated."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 6))
    z = X @ np.array([1.5, -1.0, 0.5, 0.5, 0.0, 0.0]) - 3.5
    return X, (rng.random(3000) < 1 / (1 + np.exp(-z))).astype(int)


@pytest.fixture(scope="module")
def four_classes():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 5))
    z = X @ rng.normal(size=(5, 4)) + np.array([3.0, 1.5, 0.5, 0.0]) + rng.gumbel(size=(3000, 4))
    return X, np.array(["ant", "bee", "cat", "dog"])[z.argmax(axis=1)]


def test_rule_is_learned_from_out_of_fold_probabilities(two_classes):
    X, y = two_classes
    splitter = StratifiedKFold(5, shuffle=True, random_state=0)
    p = cross_val_predict(LogisticRegression(), X, y, cv=splitter, method="predict_proba")
    assert MetricDecision(LogisticRegression()).fit(X, y).decision_ == calibrated(p, y, "f1")
    model = MetricDecision(LogisticRegression(), decision="plug_in").fit(X, y)
    assert model.decision_.threshold == pytest.approx(plug_in(p, "f1", margin=1e-4).threshold)
    assert MetricDecision(LogisticRegression(), decision="tuned").fit(X, y).decision_ == tuned(p, y, "f1")
    model = MetricDecision(LogisticRegression(), decision="argmax").fit(X, y)
    assert (model.predict(X) == LogisticRegression().fit(X, y).predict(X)).all()


@pytest.mark.slow
def test_beside_scikit_learns_tuned_threshold(two_classes):
    """Six splits: within noise of TunedThresholdClassifierCV, and above the threshold 1/2."""
    X, y = two_classes
    scores = {name: [] for name in (*DECISIONS, "theirs")}
    for seed in range(6):
        X_fit, X_test, y_fit, y_test = train_test_split(X, y, test_size=0.4, stratify=y, random_state=seed)
        models = {decision: MetricDecision(LogisticRegression(), decision=decision) for decision in DECISIONS}
        models["theirs"] = TunedThresholdClassifierCV(LogisticRegression(), scoring="f1", thresholds=50)
        for name, model in models.items():
            scores[name].append(f1_score(y_test, model.fit(X_fit, y_fit).predict(X_test)))
    mean = {name: np.mean(values) for name, values in scores.items()}
    for name in ("auto", "plug_in", "tuned"):
        assert mean[name] > mean["theirs"] - 0.01
        assert mean[name] > mean["argmax"] + 0.02


@pytest.mark.parametrize(
    ("metric", "score"), [("balanced_accuracy", balanced_accuracy_score), ("f1", partial(f1_score, average="macro"))]
)
def test_more_classes_with_names(metric, score, four_classes):
    X, y = four_classes
    X_fit, X_test, y_fit, y_test = train_test_split(X, y, test_size=0.4, stratify=y, random_state=0)
    model = MetricDecision(LogisticRegression(), metric=metric).fit(X_fit, y_fit)
    assert model.classes_.tolist() == ["ant", "bee", "cat", "dog"]
    assert model.score(X_test, y_test) == pytest.approx(score(y_test, model.predict(X_test)))
    assert model.score(X_test, y_test) > score(y_test, model.estimator_.predict(X_test)) + 0.01
    assert model.predict_proba(X_test).shape == (len(y_test), 4)


@pytest.mark.parametrize("decision", ["plug_in", "tuned"])
def test_constraints(decision, two_classes):
    X, y = two_classes
    careful = MetricDecision(
        LogisticRegression(), metric="recall", subject_to="precision >= 0.8", decision=decision
    ).fit(X, y)
    thorough = MetricDecision(
        LogisticRegression(), metric="precision", subject_to="recall >= 0.8", decision=decision
    ).fit(X, y)
    assert careful.decision_.feasible
    assert precision_score(y, careful.predict(X)) > 0.74
    assert recall_score(y, thorough.predict(X)) > 0.74
    assert thorough.decision_.threshold < careful.decision_.threshold


def test_score_is_the_metric(two_classes):
    X, y = two_classes
    model = MetricDecision(LogisticRegression(), metric="fbeta", beta=2.0, average="macro").fit(X, y)
    weight = np.random.default_rng(0).random(len(y))
    expected = fbeta_score(y, model.predict(X), beta=2.0, average="macro", sample_weight=weight)
    assert model.score(X, y, sample_weight=weight) == pytest.approx(expected)


def test_function_as_metric(four_classes):
    X, y = four_classes
    model = MetricDecision(
        GaussianNB(), metric=lambda c: c.tp[3] / (c.actual[3] + c.predicted[3]), decision="tuned"
    ).fit(X, y)
    assert model.score(X, y) == pytest.approx(f1_score(y, model.predict(X), labels=["dog"], average="macro") / 2)


def test_class_weights_are_noticed_and_corrected(two_classes):
    X, y = two_classes
    inner = LogisticRegression(class_weight="balanced")
    with pytest.warns(UserWarning, match=r"they are not calibrated .*; use decision='auto'"):
        uncalibrated = MetricDecision(inner, decision="plug_in").fit(X, y)
    for decision in ("auto", "tuned"):
        assert MetricDecision(inner, decision=decision).fit(X, y).score(X, y) > uncalibrated.score(X, y) + 0.05


def test_overconfidence_is_calibrated(two_classes):
    X, y = two_classes
    thrice = np.hstack([X, X, X])  # naive Bayes takes that for three times the evidence
    model = MetricDecision(GaussianNB(), "mcc").fit(thrice, y)
    assert 1.5 < model.decision_.temperature < 3


def test_held_out_share_prefit_and_splits(two_classes):
    X, y = two_classes
    share = MetricDecision(LogisticRegression(), folds=0.3, random_state=0).fit(X, y)
    assert share.decision_ == clone(share).fit(X, y).decision_
    assert share.decision_ != clone(share).set_params(random_state=1).fit(X, y).decision_
    fitted = LogisticRegression().fit(X[:1500], y[:1500])
    prefit = MetricDecision(fitted, folds="prefit").fit(X[1500:], y[1500:])
    assert prefit.estimator_ is fitted
    assert prefit.decision_ == calibrated(fitted.predict_proba(X[1500:]), y[1500:], "f1")
    assert not np.allclose(share.predict_proba(X), LogisticRegression().fit(X, y).predict_proba(X))
    assert MetricDecision(LogisticRegression(), folds=ShuffleSplit(2, random_state=0)).fit(X, y).decision_.feasible
    assert MetricDecision(LogisticRegression(), folds=3, n_jobs=1).fit(X, y).decision_.feasible


def test_sample_weight(two_classes):
    X, y = two_classes
    weight = np.where(y == 1, 3.0, 1.0)
    model = MetricDecision(LogisticRegression()).fit(X, y, sample_weight=weight)
    inner = LogisticRegression().fit(X, y, sample_weight=weight)
    assert np.allclose(model.predict_proba(X), inner.predict_proba(X))
    assert model.decision_ != MetricDecision(LogisticRegression()).fit(X, y).decision_
    with pytest.warns(UserWarning, match=r"KNeighborsClassifier\.fit takes no sample_weight"):
        MetricDecision(KNeighborsClassifier(30), decision="tuned").fit(X, y, sample_weight=weight)


def test_metadata_routing(two_classes):
    X, y = two_classes
    weight = np.where(y == 1, 3.0, 1.0)
    with sklearn.config_context(enable_metadata_routing=True):
        routed = MetricDecision(LogisticRegression().set_fit_request(sample_weight=True)).fit(
            X, y, sample_weight=weight
        )
        kept = MetricDecision(LogisticRegression().set_fit_request(sample_weight=False), decision="tuned")
        kept.fit(X, y, sample_weight=weight)
    direct = MetricDecision(LogisticRegression()).fit(X, y, sample_weight=weight)
    assert routed.decision_ == direct.decision_
    assert np.allclose(kept.predict_proba(X), LogisticRegression().fit(X, y).predict_proba(X))


@pytest.mark.slow
def test_in_pipelines_and_searches(two_classes):
    X, y = two_classes
    frame = pd.DataFrame(X, columns=[f"x{k}" for k in range(X.shape[1])])
    inner = make_pipeline(StandardScaler(), LogisticRegression())
    search = GridSearchCV(
        MetricDecision(inner), {"estimator__logisticregression__C": [0.01, 1.0], "decision": ["plug_in", "tuned"]}, cv=2
    ).fit(frame, y)  # fmt: skip
    assert search.best_estimator_.feature_names_in_.tolist() == list(frame.columns)
    assert search.best_score_ > 0.3
    outer = make_pipeline(StandardScaler(), MetricDecision(LogisticRegression()))
    assert cross_val_score(outer, X, y, cv=2, scoring="f1").mean() > 0.3
    assert MetricDecision(CalibratedClassifierCV(LinearSVC())).fit(X, y).score(X, y) > 0.3


def test_classes_with_few_rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(62, 3))
    y = np.array([0] * 40 + [1] * 20 + [2] * 1 + [3] * 1)
    model = MetricDecision(DecisionTreeClassifier(max_depth=2, random_state=0), decision="tuned").fit(X, y)
    assert set(model.predict(X)) <= {0, 1, 2, 3}
    tiny = MetricDecision(GaussianNB(), decision="tuned").fit(X[[0, 50]], y[[0, 50]])
    assert tiny.predict(X).shape == (62,)


def test_labels_unseen_in_fit_count_as_wrong():
    X, y = load_iris(return_X_y=True)
    model = MetricDecision(GaussianNB(), metric="accuracy").fit(X[y < 2], y[y < 2])
    assert model.score(X, y) == pytest.approx(np.mean(model.predict(X) == y))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MetricDecision(LinearSVC()), "CalibratedClassifierCV"),
        (MetricDecision(GaussianNB(), decision="plugin"), "did you mean 'plug_in'"),
        (MetricDecision(GaussianNB(), metric="f-1"), "metric must be one of"),
        (MetricDecision(GaussianNB(), folds="loo"), "folds must be"),
        (MetricDecision(GaussianNB(), decision="argmax", subject_to="recall >= 0.9"), "cannot meet constraints"),
        (MetricDecision(GaussianNB(), subject_to="recall[2] >= 0.9"), "the class in 'recall"),
        (MetricDecision(GaussianNB(), subject_to="mcc >= 0.3", confidence=0.9), "has no exact bound"),
        (MetricDecision(GaussianNB(), confidence=0.9), "confidence requires subject_to"),
        (MetricDecision(GaussianNB(), costs=[[0, 1], [1, 0]]), "metric 'cost' and costs require each other"),
        (MetricDecision(GaussianNB(), "cost"), "metric 'cost' and costs require each other"),
        (MetricDecision(GaussianNB(), pos_label=3), "pos_label must be one of"),
        (MetricDecision(GaussianNB(), subject_to="recal >= 0.9"), "did you mean 'recall'"),
    ],
)
def test_errors(model, message, two_classes):
    with pytest.raises(ValueError, match=message):
        model.fit(*two_classes)


def test_more_errors(two_classes):
    X, y = two_classes
    with pytest.raises(ValueError, match="one label per row"):
        MetricDecision(GaussianNB()).fit(X, np.stack([y, y + 2], axis=1))
    with pytest.raises(ValueError, match="has not seen"):
        MetricDecision(GaussianNB().fit(X, y), folds="prefit").fit(X, y + 1)
    assert not hasattr(MetricDecision(LinearSVC()), "predict_proba")


@pytest.mark.parametrize(
    "inner", [RandomForestClassifier(30, random_state=0), OneVsRestClassifier(LogisticRegression())]
)
def test_multilabel(inner):
    """One array per label or one for all; thresholds beat 1/2, and constraints hold on held-out rows."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(900, 4))
    y = (X @ rng.normal(size=(4, 3)) + rng.logistic(size=(900, 3)) > [1.0, 2.0, 3.0]).astype(int)
    model = MetricDecision(inner, "f1", folds=3).fit(X[:600], y[:600])
    assert model.decision_.kind == "thresholds"
    predicted = model.predict(X[600:])
    assert predicted.shape == (300, 3)
    assert model.predict_jointly(X[600:]).shape == (300, 3)
    assert model.score(X[600:], y[600:]) == pytest.approx(f1_score(y[600:], predicted, average="macro"))
    halves = (model.predict_proba(X[600:]) >= 0.5).astype(int)
    assert model.score(X[600:], y[600:]) > f1_score(y[600:], halves, average="macro", zero_division=0.0)
    held = MetricDecision(inner, "precision", subject_to="recall[2] >= 0.8", folds=0.4, random_state=0).fit(X, y)
    assert held.decision_.feasible
    assert held.decision_.reached[0] >= 0.8


def test_positive_class_and_constraints_by_label(two_classes):
    X, y = two_classes
    names = np.where(y == 1, "fraud", "honest")  # sorted, fraud comes first
    model = MetricDecision(LogisticRegression(), "precision", pos_label="fraud", subject_to="recall['fraud'] >= 0.8")
    model.fit(X, names)
    same = MetricDecision(LogisticRegression(), "precision", subject_to="recall >= 0.8").fit(X, y)
    assert ((model.predict(X) == "fraud") == same.predict(X)).all()
    assert model.score(X, names) == pytest.approx(same.score(X, y))
    assert model.decision_.reached[0] >= 0.8
    both = ["recall['fraud'] >= 0.6", "recall['honest'] >= 0.7"]
    model = MetricDecision(LogisticRegression(), "f1", pos_label="fraud", subject_to=both, confidence=0.9).fit(X, names)
    assert model.decision_.feasible
    assert (np.array(model.decision_.bounds) >= [0.6, 0.7]).all()


def test_a_held_out_share_certifies_the_model_that_is_used(two_classes):
    X, y = two_classes
    model = MetricDecision(
        LogisticRegression(), "precision", subject_to="recall >= 0.7", confidence=0.9, folds=0.5, random_state=0
    ).fit(X, y)
    assert model.decision_.bounds[0] >= 0.7
    train, _ = next(StratifiedShuffleSplit(1, test_size=0.5, random_state=0).split(X, y))
    inner = LogisticRegression().fit(X[train], y[train])
    assert np.allclose(model.predict_proba(X), inner.predict_proba(X))


def test_labels_of_a_data_frame_have_names():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 4))
    y = (X @ rng.normal(size=(4, 2)) + rng.logistic(size=(600, 2)) > 1).astype(int)
    named = pd.DataFrame(y, columns=["late", "lost"])
    inner = OneVsRestClassifier(LogisticRegression())
    model = MetricDecision(inner, "precision", subject_to="recall['lost'] >= 0.7").fit(X, named)
    assert model.classes_.tolist() == ["late", "lost"]
    by_number = MetricDecision(inner, "precision", subject_to="recall[1] >= 0.7").fit(X, y)
    assert model.decision_ == by_number.decision_
    assert model.score(X, named) == by_number.score(X, y)
    with pytest.raises(ValueError, match="do not support multilabel y"):
        MetricDecision(inner, "cost", costs=[[0, 1], [5, 0]]).fit(X, y)


def test_one_class_and_wrong_folds_are_refused(two_classes):
    X, y = two_classes
    with pytest.raises(ValueError, match="at least two classes"):
        MetricDecision(RandomForestClassifier(5)).fit(X, np.zeros(len(X)))
    with pytest.raises(ValueError, match="at least two classes"):
        MetricDecision(LogisticRegression()).fit(X[:0], y[:0])
    for folds in (0, 1, -1, 1.5, True):
        with pytest.raises(ValueError, match="folds must be"):
            MetricDecision(LogisticRegression(), folds=folds).fit(X, y)
    with pytest.raises(ValueError, match="at least one split"):
        MetricDecision(LogisticRegression(), folds=[]).fit(X, y)
    with pytest.raises(NotFittedError):
        MetricDecision(LogisticRegression()).score(X, y)


def test_certificates_count_held_out_rows_once(two_classes):
    X, y = two_classes
    everything = np.arange(len(X))
    for folds, message in [
        (RepeatedStratifiedKFold(n_splits=2, n_repeats=2), "count every row once"),
        ([(everything, everything)], "rows of training"),
    ]:
        MetricDecision(LogisticRegression(), "precision", subject_to="recall >= 0.5", folds=folds).fit(X, y)
        with pytest.raises(ValueError, match=message):
            MetricDecision(
                LogisticRegression(), "precision", subject_to="recall >= 0.5", confidence=0.9, folds=folds
            ).fit(X, y)
    first = [int(np.flatnonzero(y == k)[0]) for k in (0, 1)]
    with pytest.raises(ValueError, match="no class has two rows"):
        MetricDecision(LogisticRegression(), subject_to="recall >= 0.5", confidence=0.5).fit(X[first], y[first])


def test_infeasible_message_names_the_class_and_a_value_that_is_feasible(two_classes):
    X, y = two_classes
    names = np.where(y == 1, "fraud", "honest")
    model = MetricDecision(
        LogisticRegression(), "recall", pos_label="fraud", subject_to=["precision['fraud'] >= 0.97", "recall >= 0.97"]
    )
    with pytest.warns(UserWarning, match=r"nearest feasible: precision\['fraud'\] >= ") as caught:
        model.fit(X, names)
    nearest = str(caught[0].message).split("nearest feasible: ")[1].split(" (feasible")[0].split(" and ")
    assert not model.decision_.feasible
    assert model.set_params(subject_to=nearest).fit(X, names).decision_.feasible


def test_a_metric_of_labels_is_explained(two_classes):
    with pytest.raises(TypeError, match="a metric is a name, such as 'f1', or a function of one Confusion; f1_score"):
        MetricDecision(LogisticRegression(), f1_score).fit(*two_classes)


def test_report_of_several_labels():
    X, y = make_multilabel_classification(600, n_classes=3, random_state=0)
    model = MetricDecision(RandomForestClassifier(30, random_state=0), "f1", average="macro").fit(X[:400], y[:400])
    worth = model.report(X[400:], y[400:])
    assert worth.value.value == pytest.approx(f1_score(y[400:], model.predict(X[400:]), average="macro"))
    assert worth.value.low < worth.value.value < worth.value.high


def test_report_knows_labels_and_the_positive_class(two_classes):
    """The metric is scikit-learn's, though "fraud" comes first among the classes; so is the constraint."""
    X, y = two_classes
    names = np.where(y == 1, "fraud", "honest")
    model = MetricDecision(LogisticRegression(), "precision", pos_label="fraud", subject_to="recall['fraud'] >= 0.8")
    model.fit(X[:2000], names[:2000])
    worth = model.report(X[2000:], names[2000:])
    assert list(worth.constraints) == ["recall['fraud'] >= 0.8"]
    predicted = model.predict(X[2000:])
    assert worth.value.value == pytest.approx(precision_score(names[2000:], predicted, pos_label="fraud"))
    assert [e.value for e, _ in worth.constraints.values()] == [
        pytest.approx(recall_score(names[2000:], predicted, pos_label="fraud"))
    ]
    assert worth.threshold.low <= worth.threshold.value <= worth.threshold.high
    assert "threshold on the probability of class fraud" in str(worth)


class OtherOrder(ClassifierMixin, BaseEstimator):
    """A classifier whose `classes_` are not sorted, as of some wrappers of other libraries."""

    def fit(self, X, y):
        self.inner_ = LogisticRegression().fit(X, y)
        self.classes_ = self.inner_.classes_[::-1]
        return self

    def predict_proba(self, X):
        return self.inner_.predict_proba(X)[:, ::-1]


@pytest.mark.parametrize("prefit", [False, True])
def test_classes_may_come_in_any_order(prefit, two_classes):
    X, y = two_classes
    model = OtherOrder().fit(X, y) if prefit else OtherOrder()
    folds = "prefit" if prefit else 5
    reversed_order = MetricDecision(model, "f1", pos_label=1, folds=folds).fit(X, y)
    sorted_order = MetricDecision(LogisticRegression().fit(X, y), "f1", folds=folds).fit(X, y)
    assert reversed_order.decision_ == sorted_order.decision_
    assert (reversed_order.predict(X) == sorted_order.predict(X)).all()


def test_rows_sorted_by_their_columns_are_shuffled():
    """All combinations of four columns in order: contiguous folds would hold out values that no other row has."""
    rng = np.random.default_rng(0)
    levels = np.indices((5, 5, 5, 5)).reshape(4, -1)
    y = np.digitize(2 * levels[0] + levels[1:].sum(axis=0) + rng.normal(size=625), [12, 17])
    X = np.concatenate([np.eye(5)[column] for column in levels], axis=1)
    order = rng.permutation(625)
    expected = MetricDecision(LogisticRegression(), "f1").fit(X[order], y[order]).decision_.value
    assert MetricDecision(LogisticRegression(), "f1").fit(X, y).decision_.value == pytest.approx(expected, abs=0.08)


def test_folds_of_several_labels_are_stratified():
    """Rows sorted by label: contiguous folds would hold out all rows of a label at once."""
    rng = np.random.default_rng(0)
    y = (rng.random((600, 2)) < [0.2, 0.3]).astype(int)
    y = y[np.lexsort(-y.T)]
    X = rng.normal(size=(600, 2)) + 2 * y
    model = MetricDecision(MultiOutputClassifier(LogisticRegression()), "f1").fit(X, y)
    assert model.decision_.value > 0.55  # about that of rows in random order


def test_columns_in_another_order_adapt_alike():
    rng = np.random.default_rng(0)
    y = (rng.random(800) < 0.2).astype(int)
    X = pd.DataFrame({"low": rng.normal(size=800) + 2 * y, "high": 100 + rng.normal(size=800) + 2 * y})
    inner = make_pipeline(make_column_transformer((StandardScaler(), ["low", "high"])), LogisticRegression())
    model = MetricDecision(inner, "f1").fit(X, y)
    new = pd.concat([X[y == 1]] * 3 + [X[y == 0]])
    expected = model.adapt(new).shift_
    assert expected.kind == "shares"
    assert model.adapt(new.assign(more=1)[["more", "high", "low"]]).shift_ == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subject_to": "recall['cow'] >= 0.9"}, "the class in"),
        ({"subject_to": "mcc >= 0.5", "confidence": 0.9}, "no exact bound"),
        ({"average": "binary"}, "needs two classes"),
        ({"metric": "fbeta", "beta": [1.0, 2.0]}, "one for each of 4 classes, got 2"),
        ({"metric": "fbeta", "beta": [1.0] * 5}, "one for each of 4 classes, got 5"),
        ({"subject_to": ""}, "look like 'recall >= 0.9'"),
    ],
)
def test_wrong_goals_are_refused_before_training(options, message, four_classes):
    class Untouched(LogisticRegression):
        def fit(self, X, y):
            raise AssertionError("trained")

    with pytest.raises(ValueError, match=message):
        MetricDecision(Untouched(), **options).fit(*four_classes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner", [LogisticRegression(), DecisionTreeClassifier(max_depth=4, min_samples_leaf=20, random_state=0)]
)
def test_certificates_hold_for_the_model_of_all_rows(inner):
    """The truth is that of 200,000 rows and of the probability that each is positive; 150 repetitions."""

    def draw(rng, n):
        X = rng.normal(size=(n, 4))
        p = 1 / (1 + np.exp(3.0 - 1.8 * X[:, 0] - X[:, 1] * X[:, 2]))
        return X, (rng.random(n) < p).astype(int), p

    new, _, p = draw(np.random.default_rng(10**6), 200_000)
    wrong = np.zeros(2)
    for seed in range(150):
        X, y, _ = draw(np.random.default_rng(seed), 1000)
        for k, (metric, limit) in enumerate([("precision", "recall >= 0.8"), ("recall", "flagged <= 10%")]):
            model = MetricDecision(inner, metric, subject_to=limit, confidence=0.9).fit(X, y)
            positive = model.predict(new) == 1
            missed = p[positive].sum() < 0.8 * p.sum() if k == 0 else positive.mean() > 0.1
            wrong[k] += model.decision_.feasible and missed
    assert wrong.max() <= 15 + 3 * np.sqrt(150 * 0.1 * 0.9)


def test_numbers_in_constraints_are_labels_where_labels_are_numbers(two_classes):
    X, y = two_classes
    for labels in (10 * (y + 1), np.where(y == 1, "20", "10")):
        with pytest.raises(ValueError, match="must be one of 10, 20, got '1'"):
            MetricDecision(GaussianNB(), "accuracy", subject_to="recall[1] >= 0.97").fit(X, labels)
    named = MetricDecision(GaussianNB(), "accuracy", subject_to="recall[1] >= 0.97").fit(X, np.where(y == 1, "b", "a"))
    assert named.decision_.subject_to == ("recall[1] >= 0.97",)


def test_constraints_may_come_in_an_array(two_classes):
    several = ["recall >= 0.9", "precision >= 0.1"]
    rules = [
        MetricDecision(GaussianNB(), subject_to=s).fit(*two_classes).decision_ for s in (several, np.array(several))
    ]
    assert rules[0] == rules[1]


def test_labels_that_are_floats_go_by_their_number(two_classes):
    X, y = two_classes
    whole, floats = (MetricDecision(GaussianNB(), "accuracy", subject_to="recall[1] >= 0.97") for _ in range(2))
    whole.fit(X, y + 1), floats.fit(X, y + 1.0)
    assert floats.decision_ == whole.decision_
    assert floats.adapt(prevalence={2: 0.3}).decision_ == whole.adapt(prevalence={2: 0.3}).decision_
    betas = [MetricDecision(GaussianNB(), "fbeta", average="macro", beta=b) for b in ({1: 2.0}, [2.0, 1.0])]
    assert len({model.fit(X, y + 1.0).decision_ for model in betas}) == 1
    beta = MetricDecision(GaussianNB(), "fbeta", beta=np.int64(2)).fit(X, y)
    assert beta.decision_ == MetricDecision(GaussianNB(), "fbeta", beta=2).fit(X, y).decision_
