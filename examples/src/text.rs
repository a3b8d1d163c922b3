//! Formats numbers and tables for people, and parses numbers from them.

use std::fmt::Write;

/// Formats names and values in two columns, with one line for each pair.
///
/// ```
/// let rows = [("Time", "3 s".to_owned()), ("Accuracy", "98 %".to_owned())];
/// assert_eq!(examples::text::table(&rows), "Time      3 s\nAccuracy  98 %\n");
/// ```
pub fn table(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().fold(String::new(), |mut table, (name, value)| {
        writeln!(table, "{name:width$}  {value}").expect("a string takes all");
        table
    })
}

/// Formats a number with separated thousands: `1,234,567`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    groups
        .map(String::from_utf8_lossy)
        .collect::<Vec<_>>()
        .join(",")
}

/// Formats a number of bytes in powers of a thousand: `12.3 MB`.
pub fn bytes(number: u64) -> String {
    let units = ["kB", "MB", "GB", "TB", "PB", "EB"];
    let mut value = number as f64;
    let mut unit = "B";
    for larger in units {
        // 999.95 would round to 1000.0.
        if value < 999.95 {
            break;
        }
        value /= 1000.0;
        unit = larger;
    }
    match unit {
        "B" => format!("{number} B"),
        unit => format!("{value:.1} {unit}"),
    }
}

/// Formats a number of things: `1 rank`, `2 ranks`.
pub fn count(number: usize, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", thousands(number as u64))
}

/// Parses a rate from the command line: a learning rate, or one of weight decay.
///
/// # Errors
/// If the text is not a finite number of 0 or more.
pub fn rate(text: &str) -> Result<f64, String> {
    let rate = text
        .parse()
        .ok()
        .filter(|rate: &f64| rate.is_finite() && *rate >= 0.0);
    rate.ok_or_else(|| "expected a number of 0 or more".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_apart() {
        let texts = [0, 7, 999, 1_000, 65_536, 1_234_567].map(thousands);
        assert_eq!(texts, ["0", "7", "999", "1,000", "65,536", "1,234,567"]);
    }

    #[test]
    fn bytes_have_three_digits() {
        let texts = [0, 999, 1_000, 12_345_678, 999_940, 999_960, 5_000_000_000].map(bytes);
        let expected = [
            "0 B", "999 B", "1.0 kB", "12.3 MB", "999.9 kB", "1.0 MB", "5.0 GB",
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn one_has_no_plural() {
        assert_eq!(count(1, "rank"), "1 rank");
        assert_eq!(count(2, "rank"), "2 ranks");
    }

    #[test]
    fn rates_are_finite_and_not_negative() {
        assert_eq!(["0", "0.1", "1e-3"].map(rate), [0.0, 0.1, 1e-3].map(Ok));
        for text in ["nan", "inf", "1e999", "-1", "fast", ""] {
            assert!(rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn no_rows_make_no_table() {
        assert_eq!(table(&[]), "");
    }
}
