//! What a run leaves behind: a table, the curves, the checksum of its parameters.

use crate::cli::Args;
use crate::error::Error;
use crate::train::Outcome;

/// Prints the table and draws the curves; rank 0 only.
pub(crate) fn finish(args: &Args, outcome: &Outcome) -> Result<(), Error> {
    let Some(metrics) = &outcome.metrics else {
        return Ok(());
    };
    examples::plot::curves(metrics.rows(), "ResNet", &args.out.join("curves.png"))?;
    println!(
        "{:?} {:?} {}",
        outcome.held_out, outcome.wall, outcome.images_per_second
    );
    let _ = &outcome.model;
    Ok(())
}
