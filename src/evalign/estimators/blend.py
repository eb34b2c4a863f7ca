"""How much each member of a blend counts: weights in quarters, by log-loss on rows that all of them held out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from evalign import _checks as checks
from evalign.estimators.base import Arrays, BetaByLabel, Decision, Floats, MetricClassifier, OnEpoch, TrainingRows
from evalign.estimators.boosted import EASTBooster
from evalign.estimators.forest import EASTForest
from evalign.estimators.network import EASTClassifier
from evalign.metrics import Average, MetricFunction

STEPS = 4  # quarters: finer steps follow the noise of the held-out rows
LEAST = 1e-5  # of a probability; trees say 0 of what they have not seen, and one such row would decide alone


def blended(probabilities: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """The weighted mean, (members of (n, C)) -> (n, C).

    >>> blended([np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])], [0.75, 0.25])
    array([[0.75, 0.25]])
    """
    total = sum(w * p for w, p in zip(weights, probabilities, strict=True))
    assert isinstance(total, np.ndarray)
    return total


def best_weights(
    probabilities: Sequence[Floats], codes: NDArray[np.int64], row_weight: Floats
) -> tuple[tuple[float, ...], float]:
    """Weights of least held-out log-loss, and that loss; of equals the most even ones.

    >>> sure, unsure = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[0.5, 0.5], [0.5, 0.5]])
    >>> best_weights([sure, unsure], np.array([0, 1]), np.ones(2))[0]
    (1.0, 0.0)
    """
    at_label = [p[np.arange(len(codes)), codes] for p in probabilities]

    def loss(weights: tuple[float, ...]) -> float:
        p = sum(w * p for w, p in zip(weights, at_label, strict=True))
        return float((row_weight * -np.log(np.maximum(p, LEAST))).sum() / row_weight.sum())

    return min(((w, loss(w)) for w in sorted(shares(len(at_label)), key=max)), key=lambda found: found[1])


def shares(members: int, left: int = STEPS) -> Iterator[tuple[float, ...]]:
    """Every way to share 1 among members in steps of 1 / `STEPS`.

    >>> list(shares(2))
    [(0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (1.0, 0.0)]
    """
    if members == 1:
        yield (left / STEPS,)
        return
    for own in range(left + 1):
        for rest in shares(members - 1, left - own):
            yield (own / STEPS, *rest)


BLENDED = ("metric", "average", "beta", "pos_label", "folds", "random_state", "decision", "subject_to", "class_weight")


CLASSES: dict[str, type[Any]] = {"boost": EASTBooster, "forest": EASTForest, "network": EASTClassifier}
DEFAULTS: dict[str, dict[str, Any]] = {"boost": {}, "forest": {}, "network": {"network": "embedding"}}


def make_member(name: str, shared: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """An unfitted member with the options `given` for it, and those of the `shared` ones that it has.

    >>> make_member("forest", {"metric": "mcc", "recipe": "anchored"}, {"trees": 50})
    EASTForest(metric='mcc', trees=50)
    """
    known = CLASSES[name]().get_params()
    for option in given:
        checks.check_choice(f"option of {name}", option, sorted(set(known) - set(BLENDED)))
    options = {**DEFAULTS[name], **{option: value for option, value in shared.items() if option in known}, **given}
    return CLASSES[name](**options)


MEMBERS = ("boost", "forest", "network")
WEIGHTS = ("auto", "equal")
PASSED_ON = (  # to every member that has it
    "metric", "average", "beta", "pos_label", "recipe", "folds", "validation_fraction", "class_weight", "device",
    "n_jobs", "verbose",
)  # fmt: skip


class EASTBlend(MetricClassifier):
    """The mean of what several classifiers say, each good at what the others miss, deciding for a metric.

    Every member is trained on the same folds, so that all of them held out the same rows in the same order: there the
    weights of the mean are chosen, by log-loss, and the decision is learned on the mean. See docs/research/boosting.md.

    Parameters
    ----------
    metric, average, beta, pos_label, recipe, subject_to, class_weight, device: as in `EASTClassifier`; the forest has
        no recipe.
    decision: as there.
    members: some of "boost" (`EASTBooster`), "forest" (`EASTForest`) and "network" (`EASTClassifier`).
    weights: "auto" are those of least log-loss on held-out rows, in quarters; a member of weight 0 is dropped.
        "equal" gives all the same.
    folds: of every member.
    boost, forest, network: mappings of further options of a member, such as {"rounds": 300}. The network is one with
        embeddings unless told otherwise: {"network": "mlp"}.
    n_jobs: threads of trees; -1 is all cores.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_`, `weights_` (by member), `members_` (those with a
    weight, fitted), `decision_`, `history_` (of the members, one after the other), `encoder_` and `temperature_` (of
    the first member that has one), and after `fit` only `held_out_predictions_`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = EASTBlend("f1", members=["boost", "forest"], boost={"rounds": 20}, forest={"trees": 20}, random_state=0)
    >>> sum(model.fit(X, y).weights_.values()), model.predict_proba(X).shape
    (1.0, (150, 3))
    """

    FORMAT = "evalign.blend"

    def __init__(
        self,
        metric: str | MetricFunction = "f1",
        *,
        average: Average | None = None,
        beta: BetaByLabel = None,
        pos_label: Any = None,
        recipe: str = "anchored",
        decision: Decision = "plug_in",
        subject_to: str | Sequence[str] | None = None,
        members: Sequence[str] = MEMBERS,
        weights: Literal["auto", "equal"] = "auto",
        folds: int = 5,
        boost: Mapping[str, Any] | None = None,
        forest: Mapping[str, Any] | None = None,
        network: Mapping[str, Any] | None = None,
        validation_fraction: float = 0.2,
        class_weight: Any = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        n_jobs: int = -1,
        verbose: int = 0,
    ) -> None:
        self.metric = metric
        self.average = average
        self.beta = beta
        self.pos_label = pos_label
        self.recipe = recipe
        self.decision = decision
        self.subject_to = subject_to
        self.members = members
        self.weights = weights
        self.folds = folds
        self.boost = boost
        self.forest = forest
        self.network = network
        self.validation_fraction = validation_fraction
        self.class_weight = class_weight
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs
        self.verbose = verbose

    def _cross_fit(self, data: TrainingRows, on_epoch: OnEpoch | None) -> Floats:
        """Fit every member on the same folds and choose their weights; `on_epoch` gets those of each in turn."""
        shared = {**{name: getattr(self, name) for name in PASSED_ON}, "random_state": data.seed}
        fitted = {name: make_member(name, shared, getattr(self, name) or {}) for name in self.members}
        for member in fitted.values():
            member.fit_prepared(data, on_epoch)
        held_out = [member.held_out_predictions_ for member in fitted.values()]
        for member in fitted.values():
            del member.held_out_predictions_
        p = [one.probabilities for one in held_out]
        weights: Sequence[float] = [1 / len(p)] * len(p)
        if self.weights == "auto":
            weights, _ = best_weights(p, held_out[0].labels, held_out[0].weight)
        self.weights_ = dict(zip(fitted, weights, strict=True))
        self.members_ = {name: member for name, member in fitted.items() if self.weights_[name]}
        self.history_ = [row for member in self.members_.values() for row in member.history_]
        temperatures = [member.temperature_ for member in self.members_.values()]
        self.temperature_ = next((t for t in temperatures if t is not None), None)
        return blended(p, weights)

    def _probabilities(self, X: Any, fold: int | None = None) -> Floats:
        """The weighted mean of the members'."""
        p = [member._probabilities(X, fold) for member in self.members_.values()]
        return blended(p, [self.weights_[name] for name in self.members_])

    @property
    def encoder_(self) -> Any:
        return next(iter(self.members_.values())).encoder_

    def to(self, device: str) -> Self:
        """Predict on another device."""
        self.device = device
        for member in self.members_.values():
            member.to(device)
        return self

    def _content(self) -> tuple[Arrays, dict[str, Any]]:
        arrays: Arrays = {}
        members: dict[str, Any] = {}
        for name, member in self.members_.items():
            own, members[name] = member.content()
            arrays |= {f"{name}.{key}": value for key, value in own.items()}
        return arrays, {"weights": self.weights_, "members": members}

    def _set_content(self, arrays: Arrays, fitted: dict[str, Any]) -> None:
        self.weights_ = fitted["weights"]
        self.members_ = {
            name: CLASSES[name].from_content(
                {key.removeprefix(f"{name}."): a for key, a in arrays.items() if key.startswith(f"{name}.")}, own
            )
            for name, own in fitted["members"].items()
        }

    # -- the parts of fit ---------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        self._check_metric_and_decision()
        checks.check_choice("weights", self.weights, WEIGHTS)
        checks.check_number("folds", self.folds, low=1)
        if isinstance(self.members, str) or not len(self.members) or len(set(self.members)) < len(self.members):
            raise ValueError(f"members must be different ones of {', '.join(MEMBERS)}, got {self.members!r}")
        for name in self.members:
            checks.check_choice("member", name, MEMBERS)
