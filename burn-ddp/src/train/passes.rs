//! One pass over the data, for training or validation. All ranks take their steps together.

use burn::{
    data::dataloader::{DataLoaderIterator, Progress},
    optim::{GradientsAccumulator, GradientsParams},
};
use burn_layer::{Factor, scale_gradients};
use burn_train::{InferenceStep, LearnerEvent, LearnerModel, TrainStep, TrainingItem};

use super::{
    GatherOutput,
    fit::Fit,
    gather::{Gathered, gather},
    share::Share,
};
use crate::{Ddp, DdpError, ProcessGroup, ddp::Part};

/// How many items each rank has processed.
struct Tally {
    processed: Vec<usize>,
    total: usize,
}

impl Tally {
    fn new(group: &ProcessGroup, total: usize) -> Self {
        Self {
            processed: vec![0; group.world_size()],
            total,
        }
    }

    /// Converts an output to burn-train's type for an item.
    fn item<T>(&mut self, gathered: Gathered<T>, iteration: usize) -> TrainingItem<T> {
        self.processed[gathered.rank] = gathered.processed;
        let processed = self.processed.iter().sum();
        let progress = Progress::new(processed, self.total, Some("items".into()));
        TrainingItem::new(gathered.output, progress, Some(iteration), None)
    }
}

impl<M> Fit<'_, M>
where
    M: LearnerModel,
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    /// Trains for an epoch, or until a rank is asked to stop.
    pub(super) fn train_pass(
        &mut self,
        ddp: &mut Ddp,
        share: &Share<<M as TrainStep>::Input>,
    ) -> Result<(), DdpError> {
        let mut batches = share.loader.iter();
        let mut tally = Tally::new(self.group, self.items_shown(share));
        let mut accumulator = GradientsAccumulator::new();
        let mut accumulated = 0;
        // What all ranks have agreed on; this rank itself may be asked to stop at any moment.
        let mut stopped = false;
        for iteration in 1.. {
            let batch = self.next(&mut *batches)?;
            let active;
            (active, stopped) = self.ask(self.group, batch.is_some())?;
            ddp.set_active(active);
            if active == 0 || stopped {
                break;
            }
            let learner = &self.learner;
            let output = batch.map(|batch| match self.accumulation {
                None => learner.train_step(batch),
                Some(_) => ddp.no_sync(|_| learner.train_step(batch)),
            });
            let (gradients, output) = match output {
                Some(output) => (output.grads, Some(output.item)),
                None => (GradientsParams::new(), None),
            };
            match self.accumulation {
                None => self.update(ddp, gradients)?,
                Some(steps) => {
                    let model = self.learner.model();
                    // Ranks may run out of batches in the middle of an accumulation.
                    let gradients = match ddp.factor() {
                        1.0 => gradients,
                        factor => scale_gradients(gradients, &model, Factor::host(factor)),
                    };
                    accumulator.accumulate(&model, gradients);
                    accumulated += 1;
                    // As in burn-train, 0 is one step a batch.
                    if accumulated >= steps {
                        accumulated = 0;
                        self.update_accumulated(ddp, &mut accumulator)?;
                    }
                }
            }
            let processed = batches.progress().items_processed;
            let own = output.map(|output| (output, processed));
            for output in self.collect(own, self.strategy.gather_training)? {
                let mut item = tally.item(output, iteration);
                item.lr = Some(self.learner.lr_current());
                self.train_event(LearnerEvent::ProcessedItem(item));
            }
        }
        match accumulated > 0 && !stopped {
            true => self.update_accumulated(ddp, &mut accumulator),
            false => Ok(()),
        }
    }

    /// The number of items of an epoch that rank 0 shows in training: those of all ranks, or only its own.
    pub(super) fn items_shown(&self, share: &Share<<M as TrainStep>::Input>) -> usize {
        match self.strategy.gather_training {
            true => share.total,
            false => share.loader.num_items(),
        }
    }

    /// Validates the model of rank 0.
    pub(super) fn valid_pass(
        &mut self,
        ddp: &Ddp,
        share: &Share<<M as InferenceStep>::Input>,
    ) -> Result<(), DdpError> {
        let mut model = self.learner.model();
        if self.group.world_size() > 1 {
            // Each rank has its own running statistics, which `model` shares with the learner.
            model = ddp.receive(model, Part::Untrained)?;
        }
        let model = model.valid();
        let mut batches = share.loader.iter();
        let mut tally = Tally::new(self.group, share.total);
        for iteration in 1.. {
            let batch = self.next(&mut *batches)?;
            let (active, stopped) = self.ask(self.group, batch.is_some())?;
            if active == 0 || stopped {
                break;
            }
            let processed = batches.progress().items_processed;
            let output = batch.map(|batch| (InferenceStep::step(&model, batch), processed));
            for output in self.collect(output, true)? {
                let item = tally.item(output, iteration);
                self.valid_event(LearnerEvent::ProcessedItem(item));
            }
        }
        Ok(())
    }

    /// The next batch of this rank. If it cannot be loaded, the job ends.
    fn next<O>(&self, batches: &mut dyn DataLoaderIterator<O>) -> Result<Option<O>, DdpError> {
        batches.next().transpose().map_err(|error| {
            self.interrupter.fail(error);
            let reason = self.interrupter.error().map(|error| error.to_string());
            self.group.abort(reason.unwrap_or_default())
        })
    }

    /// Takes a step of the optimizer with the averages over all ranks.
    fn update(&mut self, ddp: &mut Ddp, gradients: GradientsParams) -> Result<(), DdpError> {
        let gradients = ddp.reduce_gradients(gradients, &self.learner.model())?;
        self.learner.lr_step();
        self.learner.optimizer_step(gradients);
        Ok(())
    }

    /// The same with accumulated gradients, which have already been multiplied by their factors.
    fn update_accumulated(
        &mut self,
        ddp: &mut Ddp,
        accumulator: &mut GradientsAccumulator<M>,
    ) -> Result<(), DdpError> {
        ddp.set_active(self.group.world_size());
        self.update(ddp, accumulator.grads())
    }

    /// The outputs for rank 0's metrics: those of all ranks, or only its own.
    fn collect<T: GatherOutput>(
        &self,
        own: Option<(T, usize)>,
        everyone: bool,
    ) -> Result<Vec<Gathered<T>>, DdpError> {
        match everyone {
            true => gather(self.group, own, &self.strategy.device.clone().inner()),
            false => {
                let own = own.filter(|_| self.group.is_main());
                let own = own.map(|(output, processed)| Gathered {
                    rank: 0,
                    output,
                    processed,
                });
                Ok(own.into_iter().collect())
            }
        }
    }
}
