#!/bin/sh
# Runs a command of brevis as a job of a Ray cluster and waits for its end, with the exit code of the command; 143 where it was stopped.
#   RAY_API_SERVER_ADDRESS=http://head:8265 deploy/submit.sh archive s3://models/llama s3://vault/archive
set -eu
: "${RAY_API_SERVER_ADDRESS:?names the dashboard of the cluster, such as http://head:8265}"
exec python "$(dirname "$0")/submit.py" "$@"
