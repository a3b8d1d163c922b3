//! Prints the results as tables.

use std::fmt::{self, Display};

use super::{Bench, Findings, Theirs};
use crate::{Goal, Goals, Precision, unpaired_ratio};
use Precision::{Bf16, Bf16ByHand, Bf16ByHandOnO0, Fp8Delayed, O0, Plain};

/// PyTorch's ways in TF32, each with that in bf16 of the same layout.
const THEIR_GAINS: [[&str; 2]; 2] = [
    ["TF32", "bf16 autocast"],
    ["TF32, channels last", "bf16 autocast, channels last"],
];

/// The results of a model, printed as Markdown tables. Without `theirs`, they show what a step costs in Burn; with `theirs`, what
/// it costs in PyTorch, how both compare, and which goals are met.
pub struct Report<'a> {
    /// What should be measured.
    pub bench: &'a Bench,
    /// The results in Burn.
    pub findings: &'a Findings,
    /// The results in PyTorch.
    pub theirs: Option<&'a Theirs>,
}

impl Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.theirs {
            None => self.ours(f),
            Some(theirs) => {
                self.torch(theirs, f)?;
                self.beside(theirs, f)?;
                write!(f, "{}", self.goals())
            }
        }
    }
}

impl Report<'_> {
    fn case(&self) -> String {
        format!("{}, batch {}", self.bench.model, self.bench.batch)
    }

    fn ours(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let case = self.case();
        writeln!(f, "What does a training step cost? {case}\n")?;
        writeln!(
            f,
            "| | median | rounds | time, of f32 | of f32, middle half | time, of bf16 | of bf16, middle half | peak memory | memory, of f32 | polls a step |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|")?;
        let found = self.findings;
        for &way in &self.bench.ways {
            let (Some([_, seconds, _]), Some(alone)) = (found.seconds(way), found.alone(way))
            else {
                continue;
            };
            let rounds = match found.rounds_of(way) {
                0 => "by itself".into(),
                rounds => rounds.to_string(),
            };
            let [of_f32, of_bf16] = [Plain, Bf16].map(|base| cells(found.ratio(way, base)));
            let memory = found.memory_ratio(way, Plain);
            let memory = memory.map_or(String::new(), |ratio| format!("{ratio:.3}"));
            let (bytes, polls) = (mebibytes(alone.bytes), alone.polls);
            writeln!(
                f,
                "| {way} | {:.3} ms | {rounds} | {of_f32} | {of_bf16} | {bytes} | {memory} | {polls:.0} |",
                seconds * 1e3
            )?;
        }
        writeln!(f)?;
        for (way, why) in &found.failed {
            writeln!(f, "- {way} failed: {}", one_line(why))?;
        }
        for way in &found.left_out {
            writeln!(f, "- {way} was left out: there was no time for it")?;
        }
        Ok(())
    }

    fn torch(&self, theirs: &Theirs, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let case = self.case();
        writeln!(f, "What does a training step cost in PyTorch? {case}\n")?;
        if !theirs.costs.is_empty() {
            writeln!(
                f,
                "| | median | steps | time, of f32 | time, of TF32 | peak memory |\n|---|---|---|---|---|---|"
            )?;
        }
        for cost in &theirs.costs {
            let own = cost.quartiles();
            let of = |base| {
                let base = theirs.seconds(base);
                base.map_or(String::new(), |base| format!("{:.3}", own[1] / base[1]))
            };
            let (of_f32, of_tf32, bytes) = (of("f32"), of("TF32"), mebibytes(cost.bytes));
            let (way, median, steps) = (&cost.way, own[1] * 1e3, cost.seconds.len());
            writeln!(
                f,
                "| PyTorch {way} | {median:.3} ms | {steps} | {of_f32} | {of_tf32} | {bytes} |"
            )?;
        }
        writeln!(f)?;
        for problem in &theirs.problems {
            writeln!(f, "- PyTorch, {}", one_line(problem))?;
        }
        Ok(())
    }

    /// The ratios of our times to theirs, which were not measured in turn.
    fn beside(&self, theirs: &Theirs, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ours = self.findings;
        let pairs = [
            (Plain, "f32"),
            (Plain, "TF32"),
            (Plain, "TF32, channels last"),
            (Bf16, "bf16 autocast"),
            (Bf16, "bf16 autocast, channels last"),
        ];
        let pairs = pairs.into_iter().filter_map(|(way, base)| {
            Some((
                way,
                base,
                unpaired_ratio(ours.seconds(way)?, theirs.seconds(base)?),
            ))
        });
        let mut pairs = pairs.peekable();
        if pairs.peek().is_none() {
            return Ok(());
        }
        let case = self.case();
        writeln!(
            f,
            "What does a training step cost, of PyTorch's time? {case}\n"
        )?;
        writeln!(f, "| | time | middle half |\n|---|---|---|")?;
        for (way, base, ratio) in pairs {
            writeln!(f, "| {way}, of PyTorch's {base} | {} |", cells(Some(ratio)))?;
        }
        for [base, low] in [["f32", "bf16 autocast"]].into_iter().chain(THEIR_GAINS) {
            let factor = theirs.ratio(base, low);
            if factor.is_some() {
                writeln!(f, "| PyTorch's {base}, of its {low} | {} |", cells(factor))?;
            }
        }
        if let Some(factor) = ours.ratio(Plain, Bf16) {
            writeln!(f, "| {Plain}, of {Bf16} | {} |", cells(Some(factor)))?;
        }
        writeln!(f)
    }

    /// Ways are judged by the rounds that they share, because by themselves they were timed minutes apart.
    ///
    /// The gain by bf16 is compared with PyTorch's gain over TF32, because Burn's tuner uses TF32 for f32 where that is faster. If
    /// PyTorch gains more with channels last, it is compared with that.
    fn goals(&self) -> Goals {
        let found = self.findings;
        let time = |of: Precision, to: Precision| {
            let name = format!("{of}: time, of {to}'s");
            (name, found.ratio(of, to).filter(|_| of != to))
        };
        let mut goals = Goals::new(&self.case());
        let fp8 = ["gpt", "vit_h"]
            .iter()
            .any(|name| self.bench.model.starts_with(name));
        for (of, to, most) in [
            (Bf16, Plain, 0.5),
            (Bf16, Bf16ByHand, 1.03),
            (Bf16, Bf16ByHandOnO0, 1.03),
            (O0, Plain, 1.02),
            (Fp8Delayed, Bf16, 1.0 / 1.2),
        ] {
            let (name, ratio) = time(of, to);
            let ratio = ratio.filter(|_| of != Fp8Delayed || fp8);
            let rounds = found.rounds_of_both(of, to);
            goals.add_timed(&name, ratio, rounds, Goal::AtMost(most));
        }
        let memory = found.memory_ratio(Bf16, Plain).map(|ratio| [ratio; 3]);
        let name = format!("{Bf16}: peak memory, of {Plain}'s");
        goals.add_if_known(&name, memory, Goal::AtMost(0.6));
        if let (Some(ours), Some((base, theirs, steps))) =
            (found.ratio(Plain, Bf16), self.their_gain())
        {
            let name =
                format!("{Bf16}: how many times as fast as {Plain}, of PyTorch's over {base}");
            let factor = Some(unpaired_ratio(ours, theirs));
            let rounds = steps.min(found.rounds_of_both(Plain, Bf16));
            goals.add_timed(&name, factor, rounds, Goal::AtLeast(1.0));
        }
        goals
    }

    /// PyTorch's largest gain by bf16 over TF32: over which way, how many times as fast, and the number of steps.
    fn their_gain(&self) -> Option<(&'static str, [f64; 3], usize)> {
        let theirs = self.theirs?;
        let gains = THEIR_GAINS.into_iter().filter_map(|[base, low]| {
            let steps = |way| Some(theirs.cost(way)?.seconds.len());
            let gain = theirs.ratio(base, low)?;
            Some((base, gain, steps(base)?.min(steps(low)?)))
        });
        gains.max_by(|(_, one, _), (_, other, _)| one[1].total_cmp(&other[1]))
    }
}

fn mebibytes(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!("{:.0} MiB", bytes as f64 / (1 << 20) as f64),
    }
}

/// A ratio and its spread, as two cells.
fn cells(ratio: Option<[f64; 3]>) -> String {
    match ratio {
        Some([low, ratio, high]) if low != high => format!("{ratio:.3} | {low:.3} to {high:.3}"),
        Some([_, ratio, _]) => format!("{ratio:.3} | "),
        None => " | ".into(),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
