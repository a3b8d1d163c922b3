//! Tests in processes of their own.

#[path = "../../../burn-layer/tests/suite/child.rs"]
mod child;

/// Runs `body`, the body of `test`, in a process of its own. Flex has one random number generator a process, and the draws of other
/// tests would come between. And every backward pass frees the unused nodes of all threads, at moments that differ from run to run.
pub(super) fn alone(test: &str, body: impl FnOnce()) {
    if !child::of(test, |_| {}) {
        body();
    }
}
