//! Executes calls on the memory of devices.

use std::sync::atomic::Ordering;

use half::{bf16, f16};

use super::{
    CUDA_ERROR, Member, REMOTE_ERROR, Trouble,
    device::{read, write},
};
use crate::nccl::{
    ffi::{DataType, Operator, Status},
    plan::{Kind, Move},
};

/// A call as one rank made it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Made {
    pub(super) call: Move,
    pub(super) dtype: DataType,
}

/// The arguments on which all ranks must agree: what the call does, the count, the `ncclDataType_t`, the `ncclRedOp_t`, the root.
type Terms = (Kind, usize, DataType, Operator, usize);

impl Made {
    fn terms(&self) -> Terms {
        let Move {
            kind,
            count,
            op,
            peer,
            ..
        } = self.call;
        (kind, count, self.dtype, op, peer)
    }

    /// A number of the rank's items.
    fn items(&self, count: usize) -> Result<Vec<u8>, Status> {
        match count {
            0 => Ok(Vec::new()),
            _ => {
                let len = count * size(self.dtype).ok_or(CUDA_ERROR)?;
                read(self.call.from, len).map_err(|_| CUDA_ERROR)
            }
        }
    }
}

/// A rank's data for a call.
#[derive(Clone)]
pub(super) struct Post {
    terms: Terms,
    data: Vec<u8>,
}

/// The size in bytes of an item of an `ncclDataType_t`.
pub(super) fn size(dtype: i32) -> Option<usize> {
    Some(match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return None,
    })
}

impl Member {
    /// Executes the calls of a group: the messages concurrently, then the collective calls one after the other.
    pub(super) fn make(&self, group: &[Made]) {
        let trouble = self.clique.meeting().troubles.get(&self.rank).copied();
        let made = match trouble {
            None => self.exchange(group).and_then(|()| {
                let collective =
                    |made: &&Made| !matches!(made.call.kind, Kind::Send | Kind::Receive);
                group
                    .iter()
                    .filter(collective)
                    .try_for_each(|made| self.collective(made))
            }),
            Some(trouble) => {
                if trouble == Trouble::Breaks {
                    self.fail(REMOTE_ERROR, "Connection reset by peer".into());
                }
                self.wait(|_| None)
            }
        };
        if let Err(status) = made
            && !self.aborted.load(Ordering::Acquire)
        {
            // The kernel has failed, and its peers spin.
            self.fail(status, "an illegal memory access was encountered".into());
            let _ = self.wait(|_| None::<()>);
        }
    }

    fn exchange(&self, group: &[Made]) -> Result<(), Status> {
        let of = |kind| group.iter().filter(move |made| made.call.kind == kind);
        let mut awaited = Vec::new();
        for made in of(Kind::Send) {
            let route = (self.rank, made.call.peer);
            let post = Post {
                terms: made.terms(),
                data: made.items(made.call.count)?,
            };
            let mut meeting = self.clique.meeting();
            let queue = meeting.messages.entry(route).or_default();
            queue.push_back(post);
            let number = queue.len();
            awaited.push((
                route,
                meeting.taken.get(&route).copied().unwrap_or(0) + number,
            ));
            self.clique.changed.notify_all();
        }
        for made in of(Kind::Receive) {
            let route = (made.call.peer, self.rank);
            let post = self.wait(|meeting| {
                let queue = meeting.messages.get_mut(&route)?;
                let (_, count, dtype, ..) = queue.front()?.terms;
                let fits = (count, dtype) == (made.call.count, made.dtype);
                let post = fits.then(|| queue.pop_front())?;
                *meeting.taken.entry(route).or_default() += 1;
                post
            })?;
            write(made.call.into, &post.data).map_err(|_| CUDA_ERROR)?;
        }
        for (route, number) in awaited {
            self.wait(|meeting| (*meeting.taken.get(&route)? >= number).then_some(()))?;
        }
        Ok(())
    }

    fn collective(&self, made: &Made) -> Result<(), Status> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let (kind, count, dtype, op, root) = made.terms();
        let ranks = self.clique.meeting().size;
        let brings = match kind {
            Kind::Broadcast if root != self.rank => 0,
            Kind::ReduceScatter => count * ranks,
            _ => count,
        };
        let data = made.items(brings)?;
        {
            let mut meeting = self.clique.meeting();
            let posts = meeting
                .posts
                .entry(number)
                .or_insert_with(|| vec![None; ranks]);
            posts[self.rank] = Some(Post {
                terms: made.terms(),
                data,
            });
            self.clique.changed.notify_all();
        }
        // If the ranks do not agree, this waits forever.
        let all: Vec<Vec<u8>> = self.wait(|meeting| {
            let posts = meeting.posts.get(&number)?;
            let theirs = |post: &Option<Post>| {
                let post = post.as_ref().filter(|post| post.terms == made.terms())?;
                Some(post.data.clone())
            };
            posts.iter().map(theirs).collect()
        })?;
        let result = match kind {
            Kind::AllReduce => reduce(&all, dtype, op),
            Kind::Reduce if root == self.rank => reduce(&all, dtype, op),
            Kind::Reduce => return Ok(()),
            Kind::Broadcast => all[root].clone(),
            Kind::AllGather => all.concat(),
            Kind::ReduceScatter => {
                let part = all[0].len() / ranks;
                reduce(&all, dtype, op)[self.rank * part..][..part].to_vec()
            }
            Kind::Send | Kind::Receive => unreachable!("messages are no collective calls"),
        };
        write(made.call.into, &result).map_err(|_| CUDA_ERROR)
    }
}

/// Combines the data of all ranks by an `ncclRedOp_t`.
fn reduce(all: &[Vec<u8>], dtype: i32, op: i32) -> Vec<u8> {
    macro_rules! typed {
        ($t:ty, $wide:ty, $to:expr, $from:expr) => {{
            let (to, from): (fn($t) -> $wide, fn($wide) -> $t) = ($to, $from);
            let values = |rank: &Vec<u8>| bytemuck::pod_collect_to_vec::<u8, $t>(rank);
            let ranks: Vec<Vec<$t>> = all.iter().map(values).collect();
            let combine = |index: usize| {
                let values = ranks.iter().map(|rank| to(rank[index]));
                from(match op {
                    0 => values.sum::<$wide>(),
                    1 => values.product::<$wide>(),
                    2 => values
                        .reduce(|one, other| if other > one { other } else { one })
                        .unwrap(),
                    3 => values
                        .reduce(|one, other| if other < one { other } else { one })
                        .unwrap(),
                    _ => values.sum::<$wide>() / all.len() as $wide,
                })
            };
            let result: Vec<$t> = (0..ranks[0].len()).map(combine).collect();
            bytemuck::cast_slice(&result).to_vec()
        }};
    }
    match dtype {
        0 => typed!(i8, i8, |x| x, |x| x),
        1 => typed!(u8, u8, |x| x, |x| x),
        2 => typed!(i32, i32, |x| x, |x| x),
        3 => typed!(u32, u32, |x| x, |x| x),
        4 => typed!(i64, i64, |x| x, |x| x),
        5 => typed!(u64, u64, |x| x, |x| x),
        6 => typed!(f16, f32, f16::to_f32, f16::from_f32),
        7 => typed!(f32, f32, |x| x, |x| x),
        8 => typed!(f64, f64, |x| x, |x| x),
        _ => typed!(bf16, f32, bf16::to_f32, bf16::from_f32),
    }
}
