//! What the threads of a warp do together: exchange values, vote, reduce, and wait for each other.
//!
//! A mask names the threads that take part. Those that have ended need not.

use std::ops::Range;

use super::{
    Result,
    block::Block,
    decode::{Function, Operands, Value},
    integer,
    parse::Register,
};

pub(super) struct Operation {
    kind: Kind,
    pub(super) members: Value,
}

enum Kind {
    Shuffle {
        to: Register,
        /// Whether the thread whose value is taken is in the segment.
        inside: Option<Register>,
        from: Value,
        mode: Mode,
        /// A distance, a mask or a number.
        by: Value,
        /// The clamp and the mask of the segment.
        bounds: Value,
    },
    Vote {
        to: Register,
        of: Value,
        count: Count,
    },
    Reduce {
        to: Register,
        of: Value,
        combine: Function,
    },
    /// One thread of them, the first.
    Elect {
        number: Option<Register>,
        chosen: Register,
    },
    Wait,
}

#[derive(Clone, Copy)]
enum Mode {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy)]
enum Count {
    All,
    Any,
    Unanimous,
    Ballot,
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Operation> {
    let (kind, members) = match opcode {
        "bar.warp.sync" => (Kind::Wait, 0),
        "elect.sync" => {
            let (number, chosen) = operands.pair(0);
            let chosen = chosen.expect("a predicate");
            (Kind::Elect { number, chosen }, 1)
        }
        _ if opcode.starts_with("shfl.sync.") => {
            let mode = match opcode {
                "shfl.sync.up.b32" => Mode::Up,
                "shfl.sync.down.b32" => Mode::Down,
                "shfl.sync.bfly.b32" => Mode::Butterfly,
                "shfl.sync.idx.b32" => Mode::Index,
                _ => return None,
            };
            let (to, inside) = operands.pair(0);
            let shuffle = Kind::Shuffle {
                to: to.expect("a result"),
                inside,
                from: operands.value(1),
                mode,
                by: operands.value(2),
                bounds: operands.value(3),
            };
            (shuffle, 4)
        }
        _ if opcode.starts_with("vote.sync.") => {
            let count = match opcode {
                "vote.sync.all.pred" => Count::All,
                "vote.sync.any.pred" => Count::Any,
                "vote.sync.uni.pred" => Count::Unanimous,
                "vote.sync.ballot.b32" => Count::Ballot,
                _ => return None,
            };
            let (to, of) = (operands.register(0), operands.value(1));
            (Kind::Vote { to, of, count }, 2)
        }
        _ => {
            let (_, combine) = integer::function(opcode.strip_prefix("redux.sync.")?)?;
            let (to, of) = (operands.register(0), operands.value(1));
            (Kind::Reduce { to, of, combine }, 2)
        }
    };
    let members = operands.value(members);
    Some(Operation { kind, members })
}

impl Block<'_> {
    /// Runs it for some threads of a warp, by their lanes. All of them are at it.
    pub(super) fn warp_operation(
        &mut self,
        operation: &Operation,
        warp: Range<usize>,
        lanes: &[usize],
    ) -> Result<()> {
        let thread = |lane: usize| warp.start + lane;
        match &operation.kind {
            Kind::Wait => self.shared.order_warp(warp.start / super::block::WARP),
            Kind::Elect { number, chosen } => {
                for &lane in lanes {
                    self.threads[thread(lane)].set(*chosen, u64::from(lane == lanes[0]))?;
                    if let Some(number) = number {
                        self.threads[thread(lane)].set(*number, lanes[0] as u64)?;
                    }
                }
            }
            Kind::Vote { to, of, count } => {
                let mut ballot = 0;
                for &lane in lanes {
                    let holds = self.value(thread(lane), *of)? != 0;
                    ballot |= u64::from(holds) << lane;
                }
                let all = lanes.iter().fold(0, |all, lane| all | 1 << lane);
                let result = match count {
                    Count::All => u64::from(ballot == all),
                    Count::Any => u64::from(ballot != 0),
                    Count::Unanimous => u64::from(ballot == 0 || ballot == all),
                    Count::Ballot => ballot,
                };
                for &lane in lanes {
                    self.threads[thread(lane)].set(*to, result)?;
                }
            }
            Kind::Reduce { to, of, combine } => {
                let mut result = None;
                for &lane in lanes {
                    let value = self.value(thread(lane), *of)?;
                    result = match result {
                        None => Some(value),
                        Some(other) => combine(&[other, value, 0, 0]),
                    };
                }
                let result = result.ok_or("the result is undefined")?;
                for &lane in lanes {
                    self.threads[thread(lane)].set(*to, result)?;
                }
            }
            Kind::Shuffle {
                to,
                inside,
                from,
                mode,
                by,
                bounds,
            } => {
                let mut values = [None; 32];
                for &lane in lanes {
                    values[lane] = Some(self.value(thread(lane), *from)?);
                }
                let mut taken = Vec::new();
                for &lane in lanes {
                    let by = self.value(thread(lane), *by)?;
                    let bounds = self.value(thread(lane), *bounds)?;
                    taken.push(source(*mode, lane as u64, by, bounds));
                }
                for (&lane, (source, is_inside)) in lanes.iter().zip(taken) {
                    match values[source as usize] {
                        Some(value) => self.threads[thread(lane)].set(*to, value)?,
                        None => self.threads[thread(lane)].forget(*to),
                    }
                    if let Some(inside) = inside {
                        self.threads[thread(lane)].set(*inside, u64::from(is_inside))?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The lane whose value a lane takes, and whether the one that it asks for is in the segment: the ISA's pseudocode of `shfl.sync`.
fn source(mode: Mode, lane: u64, by: u64, bounds: u64) -> (u64, bool) {
    let (by, clamp, segment) = (by & 31, bounds & 31, bounds >> 8 & 31);
    let last = lane & segment | clamp & !segment;
    let (wanted, inside) = match mode {
        Mode::Up => {
            let wanted = lane as i64 - by as i64;
            (wanted as u64, wanted >= last as i64)
        }
        Mode::Down => (lane + by, lane + by <= last),
        Mode::Butterfly => (lane ^ by, lane ^ by <= last),
        Mode::Index => {
            let wanted = lane & segment | by & !segment;
            (wanted, wanted <= last)
        }
    };
    (if inside { wanted } else { lane }, inside)
}
