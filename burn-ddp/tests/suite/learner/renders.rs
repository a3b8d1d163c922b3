//! Rank 0 alone renders.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use burn_ddp::DdpStrategy;
use burn_train::{
    TrainingStrategy,
    logger::{EvaluationProgressLogger, TrainingProgressLogger},
    metric::MetricDefinition,
    renderer::{
        EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
        MetricsRendererTraining,
    },
};

use super::{HELD_OUT, ITEMS, device, train};
use crate::suite::ranks::locally;

/// A renderer that counts what it is told, and remembers how far the splits have come.
#[derive(Clone, Default)]
struct Counting {
    told: Arc<AtomicUsize>,
    /// Items of each split, and how many of them were processed.
    splits: Arc<Mutex<Vec<[usize; 2]>>>,
}

impl Counting {
    fn count(&self) {
        self.told.fetch_add(1, Ordering::SeqCst);
    }
}

impl MetricsRendererTraining for Counting {
    fn update_train(&mut self, _state: MetricState) {
        self.count();
    }

    fn update_valid(&mut self, _state: MetricState) {
        self.count();
    }
}

impl MetricsRendererEvaluation for Counting {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {
        self.count();
    }
}

impl MetricsRenderer for Counting {
    fn manual_close(&mut self) {
        self.count();
    }

    fn register_metric(&mut self, _definition: MetricDefinition) {
        self.count();
    }
}

impl TrainingProgressLogger for Counting {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {
        self.count();
    }

    fn update_epoch(&mut self, _: usize) {
        self.count();
    }

    fn start_split(&mut self, _: &str, items: usize) {
        self.count();
        self.splits.lock().unwrap().push([items, 0]);
    }

    fn update_split(&mut self, processed: usize) {
        self.count();
        let mut splits = self.splits.lock().unwrap();
        splits.last_mut().unwrap()[1] = processed;
    }

    fn end_split(&mut self) {
        self.count();
    }

    fn end(&mut self) {
        self.count();
    }

    fn log_event_training(&mut self, _: String) {
        self.count();
    }
}

impl EvaluationProgressLogger for Counting {
    fn start_global_progress(&mut self, _: usize) {
        self.count();
    }

    fn start_test(&mut self, _: &str, _: usize) {
        self.count();
    }

    fn update_test_progress(&mut self, _: usize) {
        self.count();
    }

    fn end_test(&mut self) {
        self.count();
    }

    fn end_global_progress(&mut self) {
        self.count();
    }

    fn log_event_evaluation(&mut self, _: String) {
        self.count();
    }
}

#[test]
fn rank_0_alone_renders() {
    let counts = Mutex::new([0; 3]);
    locally(3, |group| {
        let renderer = Counting::default();
        let told = renderer.told.clone();
        // Even if burn-train was given a renderer, and the strategy the hard way.
        train(&group, 0.0, &device(), 2, |training, learner| {
            let strategy = Arc::new(DdpStrategy::new(&group, device()));
            training
                .renderer(Box::new(renderer))
                .with_training_strategy(TrainingStrategy::Custom(strategy))
                .launch(learner)
        });
        counts.lock().unwrap()[group.rank()] = told.load(Ordering::SeqCst);
    });
    let [main, others @ ..] = counts.into_inner().unwrap();
    // Each of 2 x (3 + 3) batches of 3 ranks has been shown, with 2 metrics.
    assert!(main >= 2 * 3 * 3 * 2, "{main}");
    assert_eq!(others, [0, 0]);
}

/// Of all ranks' items, or of those that rank 0 sees.
#[test]
fn progress_comes_to_its_end() {
    for (gathers, items) in [(true, ITEMS), (false, ITEMS / 2)] {
        let shown = locally(2, |group| {
            let renderer = Counting::default();
            let splits = renderer.splits.clone();
            train(&group, 0.0, &device(), 1, |training, learner| {
                let strategy = DdpStrategy::new(&group, device()).gather_training(gathers);
                strategy.launch(training.renderer(Box::new(renderer)), learner)
            });
            std::mem::take(&mut *splits.lock().unwrap())
        });
        assert_eq!(shown[0], [[items; 2], [HELD_OUT; 2]]);
    }
}
