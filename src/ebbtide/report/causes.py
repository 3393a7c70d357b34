"""Where a step's time goes: the causes' names for people, and what each of them means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    name: str
    meaning: str
    waits: bool = False
    """The computation stands still for it."""


UNEXPLAINED = "unexplained"
CAUSES = {
    "computing": Cause("computing", "the model's forward and backward, with autograd between our hooks"),
    "loop": Cause("the loop", "your code between ebbtide's calls: the next batch, the loss, logging"),
    "ebbtide": Cause("ebbtide", "our own work between operators: books, starting moves, ending updates"),
    "gradients": Cause("gradients", "taking each gradient into its chunk, with its norm"),
    "planning": Cause("planning", "finding the plan of a pass; the first of a kind is imagined and planned"),
    "updates": Cause("updates", "the optimizer's arithmetic on the thread that trains"),
    "host_to_device": Cause(
        "waiting: host to device", "a chunk was wanted that is on its way from the host", True
    ),
    "device_to_host": Cause(
        "waiting: device to host", "a chunk had to be gone before another had room", True
    ),
    "ssd_read": Cause("waiting: SSD reads", "something was wanted that is on its way from SSD", True),
    "ssd_write": Cause("waiting: SSD writes", "something had to be on SSD before its room was free", True),
    "wire": Cause(
        "waiting: other ranks' slices", "a gather, or an exchange of gradients, was not over", True
    ),
    "ranks": Cause("waiting: other ranks", "the other ranks had not come to the same point", True),
    "update_wait": Cause(
        "waiting: updates", "an update beside the computation had a chunk that was wanted", True
    ),
    "device_wait": Cause(
        "waiting: the device", "the gradients' norm: the host waits until backward is over", True
    ),
    "waiting": Cause("waiting", "nothing is computed: the device waits for moves, updates or room", True),
    "evaluation": Cause("evaluation", "passes without gradients"),
    "saving": Cause("saving", "writing a checkpoint, or copying what is to be written"),
    "recording": Cause("recording", "writing this run's folder"),
    UNEXPLAINED: Cause("unexplained", "what the step took and none of the clocks above has seen"),
}
ARITHMETIC = ("computing", "gradients", "updates", "device_wait")
"""Causes in which the device is at work. The host waits for it where it needs the norm: backward is not over then."""
ASIDE = ("evaluation", "saving", "recording")
"""Between steps: they count in no step's rate."""
LANES = {
    "thread": "the thread that trains",
    "updates": "updates",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "ssd_read": "SSD reads",
    "ssd_write": "SSD writes",
    "wire": "wire to other ranks",
}
WORDS = {
    "step": "the passes and the update from the end of one engine.step() to the end of the next",
    "moment": "the start of a module's forward, of its backward, of a gradient or of an update: the clock of all plans",
    "chunk": "what is allocated and moved at once: elements of neighbouring parameters",
    "device, host, SSD": "the tiers: GPU memory (on a CPU, RAM with a budget), RAM, files",
    "budget": "the bytes that ebbtide may use on a tier; it is never passed",
    "parameters, gradients": "chunks of what the model computes with, and of what backward gives",
    "optimizer state": "the master weights and what the update rule keeps (momentum, variance)",
    "activations and what else is not model data": "activations, temporaries, the batch; on the tide what the "
    "plan leaves room for",
    "buffers, host modules, exchange": "what streams state from SSD, modules that compute on the host, what ranks swap",
    "the thread that trains": "the thread that calls forward, backward and step; each of its moments has one cause",
    "updates (lane)": "the optimizer's arithmetic; on its own thread it goes on beside the computation",
    "host to device, device to host": "copies between RAM and the device's memory; on a CPU between two parts of RAM",
    "SSD reads, SSD writes": "requests to the files of the SSD tier, from their start in the queue to their end",
    "wire to other ranks": "gathers and exchanges of gradients; a bar ends where its bytes were first waited for",
    "bound": "the seconds of the busiest resource: no order of the same work makes a step shorter",
    "traced": "the step was watched to make a plan from it, which takes longer",
    "left its plan": "execution was not what the plan was made for; the pass went on by demand, with the same numbers",
}
"""What the page's words mean, beside the causes."""
RESOURCES = {"thread": "computing", "updates": "the updates' arithmetic"}
"""What a lane is called as what bounds a step."""
