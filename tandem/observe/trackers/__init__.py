"""Where metrics go besides ``metrics.jsonl``: the terminal, TensorBoard, services. ``TRACKERS`` has their names."""

from tandem.observe.trackers import local as local
from tandem.observe.trackers import mlflow as mlflow
from tandem.observe.trackers import swanlab as swanlab
from tandem.observe.trackers import trackio as trackio
from tandem.observe.trackers import wandb as wandb
from tandem.observe.trackers.fence import MAX_FAILURES as MAX_FAILURES
from tandem.observe.trackers.group import Trackers as Trackers
from tandem.observe.trackers.protocol import TRACKERS as TRACKERS
from tandem.observe.trackers.protocol import RunEnd as RunEnd
from tandem.observe.trackers.protocol import RunInfo as RunInfo
from tandem.observe.trackers.protocol import Tracker as Tracker
