//! Selects the questions that a bench asks.

use std::env;

/// Whether a question is asked: without arguments, all are; otherwise those whose names contain one of the arguments.
///
/// ```
/// assert!(benches::is_selected("resnet18"));
/// ```
pub fn is_selected(name: &str) -> bool {
    selects(env::args().skip(1), name)
}

fn selects(arguments: impl Iterator<Item = String>, name: &str) -> bool {
    // Options are skipped, because cargo passes `--bench`.
    let mut filters = arguments
        .filter(|argument| !argument.starts_with('-'))
        .peekable();
    filters.peek().is_none() || filters.any(|filter| name.contains(&filter))
}

#[cfg(test)]
mod tests {
    use super::selects;

    #[test]
    fn arguments_choose_by_a_part_of_the_name() {
        let selects =
            |arguments: &[&str], name| selects(arguments.iter().map(|a| a.to_string()), name);
        assert!(selects(&[], "resnet18"));
        assert!(selects(&["--bench"], "resnet18"));
        assert!(selects(&["--bench", "transformer", "resnet"], "resnet18"));
        assert!(!selects(&["--bench", "transformer"], "resnet18"));
    }
}
