// Names of the error kinds.
#include "base/error.h"

namespace hpcomm {

const char* to_string(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "InvalidArgument";
    case ErrorKind::kRankFailed:
      return "RankFailed";
    case ErrorKind::kPeerError:
      return "PeerError";
    case ErrorKind::kTimedOut:
      return "TimedOut";
    case ErrorKind::kSchemaMismatch:
      return "SchemaMismatch";
    case ErrorKind::kProtocol:
      return "ProtocolError";
    case ErrorKind::kDeadlock:
      return "DeadlockError";
    case ErrorKind::kClosed:
      return "Closed";
    case ErrorKind::kTransport:
      return "TransportError";
    case ErrorKind::kInternal:
      return "InternalError";
  }
  return "InternalError";
}

}  // namespace hpcomm
