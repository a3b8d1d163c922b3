//! Runs the same steps in PyTorch.

use std::{process::Command, time::Duration};

use serde::Deserialize;

use crate::{lines_of, problem_of, quartiles, unpaired_ratio};

/// The names of PyTorch's ways in `torch/steps.py` for a model: f32 alone, PyTorch's defaults (convolutions in TF32), TF32, and
/// autocast. Models without convolutions have no defaults of their own, and only those that consist of convolutions have ways with
/// channels last.
///
/// ```
/// use benches::steps::torch_ways;
///
/// assert_eq!(torch_ways("gpt2"), ["f32", "TF32", "bf16 autocast"]);
/// ```
pub fn torch_ways(model: &str) -> Vec<&'static str> {
    let mut ways = vec!["f32", "TF32", "bf16 autocast"];
    if ["resnet", "vit"].iter().any(|kind| model.starts_with(kind)) {
        ways.push("defaults");
    }
    if model.starts_with("resnet") {
        ways.extend(["TF32, channels last", "bf16 autocast, channels last"]);
    }
    ways
}

/// The results of `torch/steps.py`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Theirs {
    /// The ways that were measured.
    pub costs: Vec<Cost>,
    /// What went wrong with the others.
    pub problems: Vec<String>,
}

/// What a way of PyTorch costs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Cost {
    /// The way.
    pub way: String,
    /// The seconds that each step took.
    pub seconds: Vec<f64>,
    /// The peak memory in bytes.
    pub bytes: u64,
}

/// A line that the script prints for each way.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Cost(Cost),
    Failed { way: String, failed: String },
}

impl Theirs {
    /// Runs the script, and collects the results that it prints.
    pub fn of(script: &mut Command, limit: Option<Duration>) -> Self {
        let mut theirs = Self::default();
        let end = lines_of(script, limit, |line| match serde_json::from_str(line) {
            Ok(Line::Cost(cost)) => theirs.costs.push(cost),
            Ok(Line::Failed { way, failed }) => theirs.problems.push(format!("{way}: {failed}")),
            Err(_) => {}
        });
        theirs.problems.extend(problem_of(end));
        theirs
    }

    /// The seconds that a step of a way takes: lower quartile, median and upper quartile.
    pub fn seconds(&self, way: &str) -> Option<[f64; 3]> {
        Some(self.cost(way)?.quartiles())
    }

    /// The ratio of a way's time to another's (lower quartile, median, upper quartile), which were not measured in turn.
    pub fn ratio(&self, of: &str, to: &str) -> Option<[f64; 3]> {
        Some(unpaired_ratio(self.seconds(of)?, self.seconds(to)?))
    }

    /// The costs of a way, if it was measured.
    pub fn cost(&self, way: &str) -> Option<&Cost> {
        self.costs.iter().find(|cost| cost.way == way)
    }
}

impl Cost {
    /// The seconds that a step takes: lower quartile, median and upper quartile.
    pub fn quartiles(&self) -> [f64; 3] {
        quartiles(self.seconds.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn convolutions_have_ways_of_their_own() {
        let has = |model, way| torch_ways(model).contains(&way);
        let models = ["resnet50", "vit_b_16", "gpt2", "smollm"];
        let defaults = models.map(|model| has(model, "defaults"));
        assert_eq!(defaults, [true, true, false, false]);
        let last = models.map(|model| has(model, "TF32, channels last"));
        assert_eq!(last, [true, false, false, false]);
    }

    #[test]
    fn a_way_that_fails_leaves_the_others() {
        let script = r#"echo '{"way": "f32", "failed": "out of memory"}'
            echo 'a warning'
            echo '{"way": "TF32", "seconds": [2.0, 1.0, 3.0], "bytes": 7}'
            exit 1"#;
        let theirs = Theirs::of(Command::new("sh").args(["-c", script]), None);
        assert_eq!(theirs.seconds("TF32"), Some([1.5, 2.0, 2.5]));
        assert_eq!(theirs.cost("TF32").unwrap().bytes, 7);
        assert_eq!(theirs.seconds("f32"), None);
        assert_eq!(theirs.ratio("TF32", "f32"), None);
        assert_eq!(theirs.problems[0], "f32: out of memory");
        assert!(theirs.problems[1].contains("1"), "{:?}", theirs.problems);
    }
}
