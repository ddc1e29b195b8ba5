#!/usr/bin/env bash
# Runs Envoy with the given arguments. On SIGTERM it drains, and ends once no request is open:
#   1. For DRAIN_SECONDS it still accepts connections, and closes each after its answer, so that
#      clients and load balancers go elsewhere.
#   2. It accepts no new connection. Open requests have DRAIN_TIMEOUT seconds to end.
# ADMIN_PORT is the port of the admin interface in the configuration. Needs bash, no HTTP client.
set -u
drain_seconds=${DRAIN_SECONDS:-2}
drain_timeout=${DRAIN_TIMEOUT:-30}
admin_port=${ADMIN_PORT:-9901}

# Prints Envoy's answer to METHOD PATH at its admin interface.
admin() {
  exec 3<>"/dev/tcp/127.0.0.1/$admin_port" || return 1
  printf '%s %s HTTP/1.1\r\nHost: envoy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}

# Prints the number of open requests.
open_requests() {
  local total=0 value
  while read -r value; do
    total=$((total + value))
  done < <(admin GET '/stats?filter=^http\.(http|grpc)\.downstream_rq_active$' |
    sed -n 's/^http\.[a-z]*\.downstream_rq_active: \([0-9]*\).*/\1/p')
  echo "$total"
}

drain() {
  trap '' TERM
  echo "draining" >&2
  admin POST '/drain_listeners?graceful&skip_exit' >/dev/null
  sleep "$drain_seconds"
  admin POST /drain_listeners >/dev/null
  local deadline=$((SECONDS + drain_timeout))
  while ((SECONDS < deadline)) && (($(open_requests) > 0)); do
    sleep 0.2
  done
  echo "drained, $(open_requests) requests are open" >&2
  admin POST /quitquitquit >/dev/null || kill "$envoy"
}

envoy --drain-time-s "$drain_timeout" --drain-strategy immediate "$@" &
envoy=$!
trap drain TERM
trap 'kill "$envoy"' INT
# A signal ends `wait` early.
while kill -0 "$envoy" 2>/dev/null; do
  wait "$envoy"
  status=$?
done
exit "${status:-0}"
