//! Shows what crates log.

use log::{LevelFilter, Log, Metadata, Record};

/// From now on, writes the warnings and errors that crates log to standard error. Nothing else tells that a kernel did not
/// compile, or that a library left a product to another.
///
/// ```
/// benches::log_warnings();
/// assert!(log::log_enabled!(log::Level::Warn) && !log::log_enabled!(log::Level::Info));
/// ```
pub fn log_warnings() {
    // Another logger may already be installed.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}

struct Stderr;

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= LevelFilter::Warn
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            eprintln!("{}: {}: {}", record.level(), record.target(), record.args());
        }
    }

    fn flush(&self) {}
}
