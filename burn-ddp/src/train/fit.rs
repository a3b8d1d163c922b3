//! Runs the epochs of a training.

use std::sync::Arc;

use burn_std::RuntimeKind;
use burn_train::{
    EarlyStoppingStrategy, EventProcessorTraining, InferenceStep, Interrupter, Learner,
    LearnerEvent, LearnerModel, LearningCheckpointer, SupervisedTrainingEventProcessor,
    TrainLoader, TrainStep, TrainingComponents, ValidLoader, metric::store::EventStoreClient,
};

use super::{DdpStrategy, GatherOutput, share::Share};
use crate::{DdpError, ProcessGroup, ReduceOp, checkpoint::PATIENCE};

/// The state that all passes over the data need.
pub(super) struct Fit<'a, M: LearnerModel> {
    pub(super) strategy: &'a DdpStrategy,
    pub(super) group: &'a ProcessGroup,
    pub(super) learner: Learner<M>,
    pub(super) events: SupervisedTrainingEventProcessor<M>,
    pub(super) interrupter: Interrupter,
    pub(super) accumulation: Option<usize>,
    last_epoch: usize,
    after_epoch: AfterEpoch<M>,
}

/// What rank 0 needs between epochs, to write checkpoints and to decide about early stopping.
struct AfterEpoch<M: LearnerModel> {
    checkpointer: Option<LearningCheckpointer<M>>,
    early_stopping: Option<Box<dyn EarlyStoppingStrategy>>,
    store: Arc<EventStoreClient>,
}

impl<'a, M> Fit<'a, M>
where
    M: LearnerModel,
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    pub(super) fn new(
        strategy: &'a DdpStrategy,
        learner: Learner<M>,
        components: TrainingComponents<M>,
    ) -> Self {
        let early_stopping = components.early_stopping;
        Self {
            strategy,
            group: &strategy.group,
            learner,
            events: components.event_processor,
            interrupter: components.interrupter,
            accumulation: components.grad_accumulation,
            last_epoch: components.num_epochs,
            after_epoch: AfterEpoch {
                checkpointer: components.checkpointer,
                early_stopping: early_stopping.map(|it| it as Box<dyn EarlyStoppingStrategy>),
                store: components.event_store,
            },
        }
    }

    /// Trains until the last epoch, or until something stops the training.
    pub(super) fn run(
        mut self,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        if let Err(error) = self.epochs(train, valid, starting_epoch) {
            self.strategy.report(error, &self.interrupter);
        }
        (self.learner.model(), self.events)
    }

    fn epochs(
        &mut self,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Result<(), DdpError> {
        let DdpStrategy { device, dealt, .. } = self.strategy;
        let mut ddp = self.strategy.prepare(&mut self.learner)?;
        let mut train = Share::new(train, self.group, device, *dealt)?;
        train.starts_with(starting_epoch - 1)?;
        let inner = device.clone().inner();
        let valid = Share::new(valid, self.group, &inner, *dealt)?.each_once(self.group)?;
        // For calls in which the others wait while rank 0 writes a checkpoint.
        let patient = self.group.timeout().max(PATIENCE);
        let patient = self.group.with_timeout(patient);
        for epoch in starting_epoch..=self.last_epoch {
            train = train.of_epoch(epoch - 1, self.group)?;
            self.train_event(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: self.items_shown(&train),
            });
            if let Some(seed) = self.strategy.seed {
                device.seed(seed_of(seed, self.group.rank(), epoch));
            }
            self.train_pass(&mut ddp, &train)?;
            self.train_event(LearnerEvent::EndSplit(epoch));
            if !self.all_go_on(self.group, false)? {
                break;
            }
            self.valid_event(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: valid.total,
            });
            self.valid_pass(&ddp, &valid)?;
            self.valid_event(LearnerEvent::EndSplit(epoch));
            self.train_event(LearnerEvent::EndEpoch(epoch));
            if self.group.is_main() {
                self.interrupter.fail_on_error(self.events.flush());
            }
            if !self.all_go_on(self.group, false)? {
                break;
            }
            let enough = self.group.is_main() && self.after_epoch(epoch);
            if !self.all_go_on(&patient, enough)? {
                break;
            }
        }
        // Waits for the threads that write checkpoints.
        self.after_epoch.checkpointer = None;
        // Makes sure that the last checkpoint is on the disk when any rank returns.
        self.all_go_on(&patient, false).map(drop)
    }

    /// Writes a checkpoint. Returns whether early stopping ends the training.
    fn after_epoch(&mut self, epoch: usize) -> bool {
        let AfterEpoch {
            checkpointer,
            early_stopping,
            store,
        } = &mut self.after_epoch;
        if let Some(checkpointer) = checkpointer {
            // burn-train's threads write the records while the next epoch changes the optimizer's moments. CubeCL's
            // devices do so in place, and would otherwise read a record when its bytes are written.
            burn_std::set_runtime_kind(RuntimeKind::Async);
            checkpointer.checkpoint(&self.learner, epoch, store);
        }
        let early_stopping = early_stopping.as_mut();
        early_stopping.is_some_and(|it| it.should_stop(epoch, store))
    }

    /// Whether no rank has `enough`, and none was asked to stop. All ranks call this together.
    fn all_go_on(&self, group: &ProcessGroup, enough: bool) -> Result<bool, DdpError> {
        let (enough, stopped) = self.ask(group, enough)?;
        Ok(enough == 0 && !stopped)
    }

    /// The number of ranks with `say`, and whether any rank was asked to stop, in which case all stop. All
    /// ranks call this together. An error on any rank ends the job.
    pub(super) fn ask(&self, group: &ProcessGroup, say: bool) -> Result<(usize, bool), DdpError> {
        if let Some(error) = self.interrupter.error() {
            return Err(self.group.abort(error.to_string()));
        }
        let mut answers = [u32::from(say), u32::from(self.interrupter.should_stop())];
        group.all_reduce(&mut answers, ReduceOp::Sum)?;
        let [say, stopped] = answers;
        if stopped > 0 && !self.interrupter.should_stop() {
            self.interrupter
                .stop(Some("another rank was asked to stop"));
        }
        Ok((say as usize, stopped > 0))
    }

    /// Processes an event, on rank 0 only.
    pub(super) fn train_event(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        if self.group.is_main() {
            self.interrupter
                .fail_on_error(self.events.process_train(event));
        }
    }

    /// Processes an event, on rank 0 only.
    pub(super) fn valid_event(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        if self.group.is_main() {
            self.interrupter
                .fail_on_error(self.events.process_valid(event));
        }
    }
}

/// The seed of a rank in an epoch, different for each rank and epoch.
fn seed_of(seed: u64, rank: usize, epoch: usize) -> u64 {
    let numbers = [seed, rank as u64, epoch as u64].map(u64::to_le_bytes);
    let hash = blake3::hash(numbers.as_flattened());
    let (first, _) = hash.as_bytes().split_first_chunk().expect("32 bytes");
    u64::from_le_bytes(*first)
}
