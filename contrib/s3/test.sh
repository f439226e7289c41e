#!/bin/bash
# Runs checks.sh with a mock of S3 on loopback (moto, from PyPI). It checks no signatures and no region; garage.sh does.
#   python3 -m venv VENV && VENV/bin/pip install 'moto[server]==5.2.5'
#   contrib/s3/test.sh target/release/anemoe VENV/bin
set -euo pipefail
bin="$(realpath "$2")"
export PATH="$bin:$PATH"
. "$(dirname "$0")/functions.sh" "$1"

port="$(free_ports 1)"
moto_server -H 127.0.0.1 -p "$port" >"$work/server.log" 2>&1 &
server=$!
export AWS_ENDPOINT_URL="http://127.0.0.1:$port" AWS_REGION=us-east-1 AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test
wait_for s3 bucket models
. "$here/checks.sh"
