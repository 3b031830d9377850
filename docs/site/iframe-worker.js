// Browsers start no worker from file://. The search of a page that is opened as a file runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.room = frame.contentWindow
      this.room.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.room.importScripts = () => {} // those of other languages
      const script = frame.contentDocument.createElement("script")
      this.ready = new Promise((done, failed) => Object.assign(script, { onload: done, onerror: failed }))
      script.src = url
      frame.contentDocument.body.appendChild(script)
    }
    postMessage(data) {
      this.ready.then(() => this.room.dispatchEvent(new MessageEvent("message", { data })), console.error)
    }
    terminate() {
      this.room.frameElement.remove()
    }
  }
}
