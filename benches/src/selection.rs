//! Which questions are asked.

use std::env;

/// Whether a question is asked: all are, or those with one of the arguments in their names.
///
/// ```
/// assert!(benches::is_selected("resnet18"));
/// ```
pub fn is_selected(name: &str) -> bool {
    selects(env::args().skip(1), name)
}

fn selects(arguments: impl Iterator<Item = String>, name: &str) -> bool {
    // cargo passes `--bench`.
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
