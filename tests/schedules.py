"""A schedule of a user's own, with what callbacks call: `step`, `finished`, `state_dict`."""


class Linear:
    """The temperature falls from `start` to `end` in `steps` steps."""

    def __init__(self, loss, steps, start=0.2, end=0.01):
        self.loss, self.steps, self.start, self.end, self.taken = loss, steps, start, end, 0
        loss.temperature = start

    @property
    def finished(self):
        return self.taken >= self.steps

    def step(self, validation_loss):
        self.taken += 1
        self.loss.temperature = self.start + (self.end - self.start) * self.taken / self.steps

    def state_dict(self):
        return {"taken": self.taken}
