//! Reads what a program prints while it runs.

use std::{
    io::{self, BufRead, BufReader},
    process::{Command, ExitStatus, Stdio},
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

/// Runs a program and passes each line that it prints to `hear` at once. A program that runs longer than `limit` is killed, and
/// has no exit status.
///
/// # Errors
/// If the program cannot be started, killed or waited for.
///
/// ```
/// let mut lines = Vec::new();
/// let mut command = std::process::Command::new("echo");
/// let end = benches::lines_of(command.arg("done"), None, |line| lines.push(line.to_owned()));
/// assert!(end.unwrap().unwrap().success());
/// assert_eq!(lines, ["done"]);
/// ```
pub fn lines_of(
    command: &mut Command,
    limit: Option<Duration>,
    mut hear: impl FnMut(&str),
) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let printed = BufReader::new(child.stdout.take().expect("it is piped"));
    let (send, lines) = channel();
    thread::spawn(move || {
        for line in printed.lines() {
            // Lines that are not UTF-8 are skipped.
            if line.is_ok_and(|line| send.send(line).is_err()) {
                break;
            }
        }
    });
    loop {
        let line = match limit {
            None => lines.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(limit) => lines.recv_timeout(limit.saturating_sub(start.elapsed())),
        };
        match line {
            Ok(line) => hear(&line),
            Err(RecvTimeoutError::Disconnected) => return child.wait().map(Some),
            Err(RecvTimeoutError::Timeout) => {
                child.kill()?;
                child.wait()?;
                lines.try_iter().for_each(|line| hear(&line));
                return Ok(None);
            }
        }
    }
}

/// What went wrong with a program that [`lines_of`] ran, if something did.
///
/// ```
/// use benches::{lines_of, problem_of};
///
/// let end = lines_of(&mut std::process::Command::new("false"), None, |_| ());
/// assert_eq!(problem_of(end).unwrap(), "its process ended: exit status: 1");
/// assert_eq!(problem_of(Ok(None)).unwrap(), "the time was up");
/// ```
pub fn problem_of(end: io::Result<Option<ExitStatus>>) -> Option<String> {
    match end {
        Ok(Some(end)) if end.success() => None,
        Ok(Some(end)) => Some(format!("its process ended: {end}")),
        Ok(None) => Some("the time was up".into()),
        Err(error) => Some(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_printed_before_the_end_is_heard() {
        let shell = |script: &str, limit| {
            let mut lines = Vec::new();
            let mut command = Command::new("sh");
            let end = lines_of(command.args(["-c", script]), limit, |line| {
                lines.push(line.to_owned());
            });
            (end.unwrap().map(|status| status.code()), lines)
        };
        let (end, lines) = shell("echo this; echo that; exit 3", None);
        assert_eq!(
            (end, lines),
            (Some(Some(3)), vec!["this".into(), "that".into()])
        );
        let (end, lines) = shell("echo this; exec sleep 60", Some(Duration::from_secs(2)));
        assert_eq!((end, lines), (None, vec!["this".into()]));
        assert!(lines_of(&mut Command::new("/nothing/here"), None, |_| ()).is_err());
    }
}
