//! A logger for the ranks that write no log file.

use std::io;

use burn_train::ApplicationLoggerInstaller;
use tracing_subscriber::filter::LevelFilter;

/// Prints errors to stderr, unless the program has a logger of its own: what ends a layered device is only in the log.
pub(super) struct ErrorsShown;

impl ApplicationLoggerInstaller for ErrorsShown {
    fn install(&self) -> Result<(), String> {
        let logger = tracing_subscriber::fmt()
            .with_max_level(LevelFilter::ERROR)
            .with_writer(io::stderr)
            .with_ansi(false);
        // It fails if there is another.
        let _ = logger.try_init();
        Ok(())
    }
}
