#!/bin/sh
# Runs a command of brevis as a job of a Ray cluster and waits for its end; the exit code tells whether it succeeded.
#   RAY_API_SERVER_ADDRESS=http://head:8265 deploy/submit.sh archive s3://models/llama s3://vault/archive
set -eu
: "${RAY_API_SERVER_ADDRESS:?names the dashboard of the cluster, such as http://head:8265}"
cd "$(dirname "$0")/.."
exec ray job submit --working-dir . --runtime-env deploy/runtime_env.yaml -- python -m pipeline "$@" --ray
