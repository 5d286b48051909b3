#!/usr/bin/env bash
# Submit a run to a Ray cluster that is there, by its dashboard:
#
#   ray start --head                                  # once, on the first node
#   examples/launch/ray_job.sh run.yaml trainer.total_steps=100
#
# The folder you stand in is sent along. Everything after the name of the script is for `tandem train`.
set -euo pipefail

: "${DASHBOARD:=http://127.0.0.1:8265}"
: "${PYTHON:=python3}"

ray job submit --address="${DASHBOARD}" --working-dir . -- "${PYTHON}" -m tandem train runtime.name=ray "$@"
