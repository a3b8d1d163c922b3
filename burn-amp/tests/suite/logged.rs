//! What tests hear of the log.

use std::{cell::RefCell, sync::Once};

thread_local! {
    static LOGGED: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Keeps the warnings of each thread, which is to say of each test.
struct Capture;

impl log::Log for Capture {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            LOGGED.with_borrow_mut(|logged| logged.push(record.args().to_string()));
        }
    }

    fn flush(&self) {}
}

/// The warnings that `body` logs on this thread.
pub(super) fn logged(body: impl FnOnce()) -> Vec<String> {
    static SET: Once = Once::new();
    SET.call_once(|| {
        log::set_logger(&Capture).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    });
    LOGGED.take();
    body();
    LOGGED.take()
}
