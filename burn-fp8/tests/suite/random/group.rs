//! [`Group`]: ranks that are threads, and share amaxes.

use std::error::Error;
use std::sync::{Arc, Condvar, Mutex};

use burn::tensor::{Tensor, TensorData};
use burn_fp8::recipe::AmaxReducer;

use super::reference;
use crate::suite::device::values;

/// Threads that take maxima together.
#[derive(Debug)]
pub(super) struct Group {
    ranks: usize,
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: usize,
    asked: Vec<Vec<f32>>,
    answer: Vec<f32>,
    /// Whether a rank has left.
    left: bool,
}

impl Group {
    fn new(ranks: usize) -> Arc<Self> {
        Arc::new(Self {
            ranks,
            round: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// The largest of all ranks' amaxes; `None` if a rank has left.
    pub(super) fn max(&self, own: Vec<f32>) -> Option<Vec<f32>> {
        let mut round = self.round.lock().unwrap();
        let number = round.number;
        round.asked.push(own);
        if round.asked.len() == self.ranks {
            let asked = core::mem::take(&mut round.asked);
            let places = 0..asked[0].len();
            round.answer = places
                .map(|place| reference::amax(asked.iter().map(|amaxes| amaxes[place])))
                .collect();
            round.number += 1;
            self.changed.notify_all();
        }
        let waits = |round: &mut Round| round.number == number && !round.left;
        let round = self.changed.wait_while(round, waits).unwrap();
        (round.number != number).then(|| round.answer.clone())
    }

    fn leave(&self) {
        self.round.lock().unwrap().left = true;
        self.changed.notify_all();
    }
}

impl AmaxReducer for Group {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        let device = amaxes.device();
        let all = Group::max(self, values(amaxes)).ok_or("a rank has left")?;
        Ok(Tensor::from_data(TensorData::from(&all[..]), &device))
    }
}

/// A group of one, for which another rank saw larger numbers.
#[derive(Debug)]
pub(super) struct Doubled;

impl AmaxReducer for Doubled {
    fn max(&self, amaxes: Tensor<1>) -> Result<Tensor<1>, Box<dyn Error + Send + Sync>> {
        Ok(amaxes * 2.0)
    }
}

/// A rank among others: of the layers, and of their models.
#[derive(Clone)]
pub(super) struct Rank {
    pub(super) number: usize,
    group: Option<[Arc<Group>; 2]>,
}

impl Rank {
    /// The ranks of a group; one alone has none.
    pub(super) fn all(count: usize) -> Vec<Self> {
        let group = (count > 1).then(|| [(); 2].map(|()| Group::new(count)));
        let rank = |number| Self {
            number,
            group: group.clone(),
        };
        (0..count).map(rank).collect()
    }

    /// Those that wait for this rank wait no longer.
    pub(super) fn leave(&self) {
        self.group.iter().flatten().for_each(|group| group.leave());
    }

    pub(super) fn layers(&self) -> Option<Arc<Group>> {
        self.group.as_ref().map(|[layers, _]| layers.clone())
    }

    pub(super) fn models(&self) -> Option<Arc<Group>> {
        self.group.as_ref().map(|[_, models]| models.clone())
    }
}
